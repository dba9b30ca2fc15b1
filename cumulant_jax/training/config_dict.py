"""The edge where ml_collections ends: ConfigDicts and command lines become `ExperimentConfig`.

This is the only module of the package that knows ml_collections. A config file looks like this:

    from cumulant_jax.training import config_arguments, default_config_dict

    def get_config(arg=""):
        arguments = config_arguments(arg, attention="softmax", seed=0)
        config = default_config_dict()
        config.model.attention = arguments.attention
        return config
"""

import dataclasses
import importlib.util
import inspect
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_collections
from absl import flags
from ml_collections import config_dict, config_flags

from cumulant_jax import models
from cumulant_jax.naming import unknown_name
from cumulant_jax.training.config import ExperimentConfig, unknown_key

_FLAG = "config"
_OPTIONS = "model.options"


def default_config_dict() -> Any:
    """Returns a ConfigDict that holds every key of `ExperimentConfig` at its default.

    Keys whose default is None are typed placeholders, so a command line can set each key.
    Keys that do not exist cannot be assigned; only `model.options` takes new ones.

    >>> config = default_config_dict()
    >>> config.optimizer.learning_rate = 3e-4
    >>> from_config_dict(config).optimizer.learning_rate
    0.0003
    """
    config: Any = _sections(ExperimentConfig())
    config.lock()
    config.model.options.unlock()
    return config


def from_config_dict(config: ml_collections.ConfigDict | Mapping[str, Any]) -> ExperimentConfig:
    """Turns a ConfigDict (or nested dicts) into a validated `ExperimentConfig`.

    Raises:
      ValueError: for a key that does not exist, naming the nearest one, or a value out of range.
      TypeError: for a value of the wrong type.
    """
    values = config.to_dict() if isinstance(config, ml_collections.ConfigDict) else config
    return ExperimentConfig.from_dict(values)


def config_arguments(text: str | None, **defaults: Any) -> types.SimpleNamespace:
    """Parses the part of `--config file.py:attention=cumulant3,variant=ti4` behind the colon.

    Args:
      text: comma-separated `key=value` pairs; empty or None leaves the defaults.
      **defaults: the keys that exist with their defaults; values take the default's type.

    Raises:
      ValueError: for an unknown key (naming the nearest), a missing "=" or a value of another type.

    >>> config_arguments("attention=cumulant3", attention="softmax", seed=0)
    namespace(attention='cumulant3', seed=0)
    """
    values = dict(defaults)
    for part in filter(None, (text or "").split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in defaults:
            raise ValueError(unknown_name("config argument", key, defaults))
        if not equals:
            raise ValueError(f"config argument {key}: got no value, expected {key}=VALUE.")
        kind = type(defaults[key])
        try:
            values[key] = kind(value)
        except ValueError:
            raise ValueError(
                f"config argument {key}: got {value!r}, expected {kind.__name__}."
            ) from None
    return types.SimpleNamespace(**values)


def load_config(spec: str, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """Loads `file.py` or `file.py:arguments` and applies `--config.key=value` overrides.

    Args:
      spec: the path of a Python file with `get_config()`, and its argument behind a colon.
      overrides: command-line arguments, each `--config.key=value`.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: for an unknown key or argument, or a value that cannot be parsed.
      TypeError: if `get_config` returns no ConfigDict.
    """
    path, _, argument = spec.partition(":")
    config = _get_config(Path(path), argument)
    for override in overrides:
        _check_key(override.partition("=")[0].lstrip("-").removeprefix(f"{_FLAG}."), config)
    # A private registry: loading a config leaves no trace in absl's global flags.
    registry = flags.FlagValues()
    argv = [_FLAG, *overrides]
    try:
        config_flags.DEFINE_config_dict(_FLAG, config, flag_values=registry, sys_argv=argv)
        registry(argv)
    except flags.Error as error:
        raise ValueError(" ".join(str(error).split())) from None
    return from_config_dict(config)


def _get_config(path: Path, argument: str) -> ml_collections.ConfigDict:
    if not path.is_file():
        files = [str(path.parent / file.name) for file in path.parent.glob("*.py")]
        raise FileNotFoundError(f"--config: {unknown_name('file', str(path), files)}")
    spec = importlib.util.spec_from_file_location(f"_config_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"--config: {str(path)!r} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise ValueError(f"--config: {str(path)!r} does not define get_config().")
    takes_argument = bool(inspect.signature(module.get_config).parameters)
    if argument and not takes_argument:
        raise ValueError(f"--config: get_config() of {str(path)!r} takes no argument.")
    try:
        config = module.get_config(argument) if takes_argument else module.get_config()
    except (AttributeError, KeyError) as error:
        # What ml_collections raises when a config file assigns a key that does not exist.
        raise ValueError(f"{path}: {_assigned_key(error)}") from error
    if not isinstance(config, ml_collections.ConfigDict):
        raise TypeError(f"--config: get_config() of {str(path)!r} returned no ConfigDict.")
    return config


def _assigned_key(error: Exception) -> str:
    """Names the key of an assignment that a locked ConfigDict refused."""
    frame = error.__traceback__
    while frame is not None:
        variables = frame.tb_frame.f_locals
        if isinstance(variables.get("self"), ml_collections.ConfigDict):
            name = variables.get("attribute", variables.get("key", variables.get("name")))
            if isinstance(name, str):
                section = list(variables["self"].keys())
                return unknown_key(name, dict.fromkeys(section), ExperimentConfig().to_dict())
        frame = frame.tb_next
    return " ".join(str(error).split())


def _check_key(key: str, config: Any) -> None:
    """Raises ValueError unless the key exists; makes room for an option the file does not set."""
    section: Any = config
    names = key.split(".")
    for depth, name in enumerate(names):
        known = _names(section)
        path = ".".join(names[: depth + 1])
        if name in known:
            section = getattr(section, name)
        elif path == f"{_OPTIONS}.{name}" and name in models.options(config.model.name):
            config.model.options[name] = config_dict.placeholder(object)
            section = None
        else:
            known += models.options(config.model.name) if path.startswith(_OPTIONS) else []
            raise ValueError(unknown_key(path, dict.fromkeys(known), config.to_dict()))


def _names(section: Any) -> list[str]:
    return list(section) if isinstance(section, ml_collections.ConfigDict) else []


def _sections(value: Any) -> ml_collections.ConfigDict:
    """Builds the ConfigDict of a config dataclass, typed placeholders where a default is None."""
    hints = typing.get_type_hints(type(value))
    items = {}
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if dataclasses.is_dataclass(item):
            item = _sections(item)
        elif isinstance(item, Mapping):
            item = ml_collections.ConfigDict(dict(item))
        elif item is None:
            kinds = [k for k in typing.get_args(hints[field.name]) if k is not types.NoneType]
            simple = len(kinds) == 1 and kinds[0] in (int, float, str, bool)
            item = config_dict.placeholder(kinds[0] if simple else object)
        items[field.name] = item
    return ml_collections.ConfigDict(items)
