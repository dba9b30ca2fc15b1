"""What programs cost on accelerators: arithmetic, exchanges, and chips as their makers describe
them.
"""
