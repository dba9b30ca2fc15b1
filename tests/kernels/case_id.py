"""Names of test cases, the same in every process."""


def case_id(case: tuple) -> str:
    """The parts of a case; of a function its name, as its text holds an address."""
    return "-".join(str(getattr(part, "__name__", part)) for part in case)
