"""Finds the folder in which TFDS prepared a data set, without a network and without TensorFlow."""

import difflib
import os
import re
from pathlib import Path

from cumulant_jax.naming import unknown_name

EMBEDDED = ("digits",)
_VERSION = re.compile(r"\d+\.\d+\.\d+")


def default_data_dir() -> Path:
    """The directory that TFDS itself uses: $TFDS_DATA_DIR, else ~/tensorflow_datasets."""
    return Path(os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()


def find(name: str, data_dir: str | os.PathLike[str] | None = None) -> Path:
    """Finds the prepared folder NAME[/CONFIG]/VERSION of a data set.

    Args:
      name: "cifar10", "imagenette/320px-v2", optionally with ":VERSION". Without a version the
        newest prepared one is taken, without a configuration the only prepared one.
      data_dir: the TFDS data directory; None is `default_data_dir()`.

    Returns:
      The folder that holds dataset_info.json.

    Raises:
      FileNotFoundError: TFDS knows the data set but it is not prepared; the message says where it
        was looked for and gives the command that prepares it.
      ValueError: an unknown name, or several prepared configurations to choose from.
    """
    root = Path(data_dir).expanduser() if data_dir is not None else default_data_dir()
    builder, config, version = _split_name(name)
    folder = root / builder
    if not config:
        configs = [child.name for child in _children(folder) if _versions(child)]
        if configs and not _versions(folder):
            if len(configs) > 1:
                choices = ", ".join(f"{builder}/{choice}" for choice in configs)
                raise ValueError(f"name={name!r}: several are prepared, choose from: {choices}")
            config = configs[0]
    folder = folder / config if config else folder
    versions = _versions(folder)
    wanted = version or (versions[-1] if versions else None)
    if wanted in versions:
        return folder / str(wanted)
    if versions:
        raise ValueError(unknown_name(f"version of data set {builder!r}", version, versions))
    raise _not_prepared(name, builder, folder, root)


def prepare_command(name: str, data_dir: Path) -> str:
    """The command that downloads and prepares an official TFDS data set.

    >>> print(prepare_command("mnist", Path("/data")))
    python3.12 -m venv prepare && prepare/bin/pip install tensorflow tensorflow-datasets &&
    prepare/bin/tfds build mnist --file_format=array_record --data_dir=/data
    """
    return (
        # An environment of its own: TensorFlow is not needed to read the data.
        "python3.12 -m venv prepare && prepare/bin/pip install tensorflow tensorflow-datasets && "
        f"prepare/bin/tfds build {name} --file_format=array_record --data_dir={data_dir}"
    )


def _split_name(name: str) -> tuple[str, str, str]:
    path, _, version = name.partition(":")
    builder, _, config = path.partition("/")
    parts = [builder, *(config.split("/") if config else [])]
    if not all(re.fullmatch(r"[\w.=,-]+", part) and part != ".." for part in parts):
        raise ValueError(f"name must be NAME, NAME/CONFIG or NAME/CONFIG:VERSION, got {name!r}")
    return builder, config, version


def _children(folder: Path) -> list[Path]:
    return sorted(child for child in folder.iterdir() if child.is_dir()) if folder.is_dir() else []


def _versions(folder: Path) -> list[str]:
    """Prepared versions inside a folder, oldest first."""
    names = [
        child.name
        for child in _children(folder)
        if _VERSION.fullmatch(child.name) and (child / "dataset_info.json").is_file()
    ]
    return sorted(names, key=lambda text: tuple(map(int, text.split("."))))


def _not_prepared(name: str, builder: str, folder: Path, root: Path) -> Exception:
    import tensorflow_datasets as tfds

    # Without community data sets this reads a list from the package; with them it would download.
    official = tfds.list_builders(with_community_datasets=False)
    if builder in official:
        return FileNotFoundError(
            f"data set {name!r} is not prepared in {folder}; prepare it with: "
            f"{prepare_command(name, root)}"
        )
    prepared = [child.name for child in _children(root) if _is_prepared(child)]
    near = difflib.get_close_matches(builder, official, n=3, cutoff=0.5)
    return ValueError(
        unknown_name(
            "data set",
            builder,
            {*EMBEDDED, *prepared, *near},
            remedy=f"Looked for prepared data sets in {root} (data_dir).",
        )
    )


def _is_prepared(folder: Path) -> bool:
    return bool(_versions(folder)) or any(_versions(child) for child in _children(folder))
