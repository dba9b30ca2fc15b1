"""The cumulant_jax package; tool settings live in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

JAX = ">=0.11.2,<0.13"

# What the attention functions, models, the training loop and the embedded digits need. Importing
# cumulant_jax itself, its functions and models takes no more than the first three. Lower bounds are
# the oldest that run together; older releases of Flax do not import under this JAX.
INSTALL_REQUIRES = [
    f"jax{JAX}",
    "flax>=0.12.10",
    "numpy>=2.2",
    "absl-py>=2.1",
    "grain>=0.2.15",
    "ml_collections>=1.1",
    "optax>=0.2.5",
    "orbax-checkpoint>=0.11.25",
    "rich>=13.7",
    "safetensors>=0.5",
    "scikit-learn>=1.6",
    "tensorboardX>=2.6.2.2",
    # TFDS data sets, read without TensorFlow. Pillow decodes their images.
    "pillow>=11",
    "tensorflow-datasets>=4.9.9",
]

ANALYSIS = ["matplotlib>=3.10"]

EXTRAS_REQUIRE = {
    "cuda": [f"jax[cuda13]{JAX}"],
    "tpu": [f"jax[tpu]{JAX}"],
    "video": ["av>=14"],
    "analysis": ANALYSIS,
    "dev": [
        *ANALYSIS,
        # What `jax.export` serialises with.
        "flatbuffers>=24.3",
        # A Node.js of its own, so that the type checker needs none on the machine.
        "pyright[nodejs]>=1.1.400",
        "pytest>=8.4",
        "pytest-xdist>=3.6",
        "ruff>=0.14",
    ],
}

setup(
    name="cumulant_jax",
    version="0.1.0",
    description="Linear-time attention for vision in JAX: cumulant attention and ToST.",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["jax", "flax", "attention", "linear attention", "cumulant", "ToST", "vision"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: MacOS",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Programming Language :: Python :: 3.14",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Scientific/Engineering :: Image Recognition",
    ],
    python_requires=">=3.12",
    packages=find_packages(include=["cumulant_jax", "cumulant_jax.*"]),
    package_data={
        "cumulant_jax.analysis": ["*.html", "*.css"],
        "cumulant_jax.data": ["class_lists/*.txt"],
        "cumulant_jax.kernels": ["*.json"],
    },
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS_REQUIRE,
)
