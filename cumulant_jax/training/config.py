"""The configuration of an experiment: frozen, nested, validated dataclasses.

Every field is checked when the object is made, so a config that exists is a valid one as far as
it can be known without the data. Lists in the input become tuples; nothing here knows
ml_collections (see `config_dict`).
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from cumulant_jax import models
from cumulant_jax.data import DataConfig
from cumulant_jax.naming import unknown_name
from cumulant_jax.training.durations import Duration

DTYPES = ("float32", "bfloat16")


# Arguments of `cumulant_jax.models.create` that are set elsewhere.
_OWN_PLACES = {
    "attention": "use model.attention",
    "dtype": "use model.dtype",
    "num_classes": "it follows from data.name",
    "channels": "it follows from data.name",
    "image_size": "use data.image_size",
}


def _require(condition: bool, key: str, value: object, expected: str) -> None:
    if not condition:
        raise ValueError(f"config key {key}: got {value!r}, expected {expected}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model is trained.

    Attributes:
      name: a preset of `cumulant_jax.models.list_models()`.
      attention: the attention kind; several joined by "+" give one kind per layer (a hybrid).
      dtype: the type of the computation; parameters, optimizer state and loss stay float32.
      options: further keyword options of `cumulant_jax.models.create`, such as `pooling`.
    """

    name: str = "vit_nano2"
    attention: str = "softmax"
    dtype: str = "float32"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        """Normalises a tuple of kinds to "a+b" and checks the names."""
        given: object = self.attention
        if isinstance(given, tuple | list):
            object.__setattr__(self, "attention", "+".join(map(str, given)))
        known_options = models.options(self.name)
        for kind in self.attention.split("+"):
            if kind not in models.attention_kinds():
                raise ValueError(unknown_name("attention kind", kind, models.attention_kinds()))
        for option in self.options:
            if option in _OWN_PLACES:
                raise ValueError(
                    f"config key model.options.{option}: is not an option here; "
                    f"{_OWN_PLACES[option]}."
                )
            if option not in known_options:
                known_options = [name for name in known_options if name not in _OWN_PLACES]
                keys = [f"model.options.{name}" for name in known_options]
                raise ValueError(unknown_name("config key", f"model.options.{option}", keys))
        if self.dtype not in DTYPES:
            raise ValueError(f"config key model.dtype: {unknown_name('type', self.dtype, DTYPES)}")

    @property
    def attention_kinds(self) -> str | tuple[str, ...]:
        """The kind, or the kinds by layer, as `cumulant_jax.models.create` takes them."""
        kinds = tuple(self.attention.split("+"))
        return kinds if len(kinds) > 1 else self.attention


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with linear warm-up, cosine decay and clipping by the global norm.

    Attributes:
      learning_rate: the peak learning rate, reached at the end of the warm-up.
      warmup: the duration of the warm-up, such as "2 epochs".
      final_fraction: the learning rate at the end, as a fraction of the peak.
      weight_decay: decoupled decay of kernels (times the learning rate), not of norms, biases,
        positions or scales.
      b1: decay rate of the first moment.
      b2: decay rate of the second moment.
      eps: added to the root of the second moment.
      clip_norm: largest global norm of the gradient; None does not clip.
    """

    learning_rate: float = 1e-3
    warmup: str | int = "0 steps"
    final_fraction: float = 0.0
    weight_decay: float = 0.05
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    clip_norm: float | None = 1.0

    def __post_init__(self):
        """Checks the values."""
        Duration.parse(self.warmup, name="config key optimizer.warmup")
        for key, low in (("learning_rate", 0.0), ("weight_decay", 0.0), ("eps", 0.0)):
            value = getattr(self, key)
            _require(value >= low, f"optimizer.{key}", value, "a number of at least 0")
        for key in ("b1", "b2"):
            value = getattr(self, key)
            _require(0 <= value < 1, f"optimizer.{key}", value, "a number in [0, 1)")
        fraction = self.final_fraction
        _require(0 <= fraction <= 1, "optimizer.final_fraction", fraction, "a number in [0, 1]")
        if self.clip_norm is not None:
            _require(self.clip_norm > 0, "optimizer.clip_norm", self.clip_norm, "a positive number")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixingConfig:
    """Mixing of examples and softening of labels, done on the device.

    Attributes:
      label_smoothing: the share of the label's mass that is spread over all classes.
      mixup: the parameter of the Beta distribution of mixup; 0 is off.
      cutmix: the same for cutmix; with both on, each batch takes one of them by a fair coin.
      probability: the probability that a batch is mixed at all.
    """

    label_smoothing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    probability: float = 1.0

    def __post_init__(self):
        """Checks the values."""
        smoothing = self.label_smoothing
        _require(0 <= smoothing < 1, "mixing.label_smoothing", smoothing, "a number in [0, 1)")
        for key in ("mixup", "cutmix"):
            value = getattr(self, key)
            _require(value >= 0, f"mixing.{key}", value, "a number of at least 0")
        _require(
            0 <= self.probability <= 1,
            "mixing.probability",
            self.probability,
            "a number in [0, 1]",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """Everything that determines an experiment.

    Durations are strings such as "40 epochs", "1200 steps", "300000 examples", or an int (steps).
    The three `*_every` durations may be 0: only at the end then.

    Attributes:
      task: what is learned; a name of `cumulant_jax.training.tasks.TASKS`.
      seed: of the parameters, the data order, augmentation, mixing and dropout.
      batch_size: examples per step, over all devices.
      total: the duration of the training.
      evaluate_every: between evaluations.
      checkpoint_every: between checkpoints; each comes with an evaluation, and only these
        evaluations compete for the best.
      log_every: between rows of training metrics.
      eval_batch_size: examples per evaluation batch; None is `batch_size`.
      gradient_accumulation: micro-batches that a batch is split into.
      ema_decay: decay of the moving average of the parameters that is evaluated; None is off.
      keep_last: the number of latest checkpoints that are kept.
      keep_best: the number of best checkpoints that are kept besides.
      mesh: sizes of the device mesh's axes, such as "data=2,fsdp=4"; -1 takes all remaining
        devices. See `cumulant_jax.training.mesh.AXES`.
      profile_steps: the first and the last step whose trace is written into the run directory,
        (10, 15) or "10,15"; None for none. Does not belong to the experiment: a run may go on with
        another value.
      model: the model.
      data: the data set and its augmentation.
      optimizer: the optimizer.
      mixing: mixup, cutmix and label smoothing.
    """

    task: str = "classification"
    seed: int = 0
    batch_size: int = 64
    total: str | int = "10 epochs"
    evaluate_every: str | int = "1 epochs"
    checkpoint_every: str | int = "1 epochs"
    log_every: str | int = "50 steps"
    eval_batch_size: int | None = None
    gradient_accumulation: int = 1
    ema_decay: float | None = None
    keep_last: int = 2
    keep_best: int = 1
    mesh: str = "data=-1"
    profile_steps: Any = None
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    mixing: MixingConfig = dataclasses.field(default_factory=MixingConfig)

    def __post_init__(self):
        """Checks the values."""
        for key in ("total", "evaluate_every", "checkpoint_every", "log_every"):
            duration = Duration.parse(getattr(self, key), name=f"config key {key}")
            if key == "total":
                _require(duration.value > 0, key, self.total, "a duration above 0")
        for key in ("batch_size", "gradient_accumulation", "keep_last"):
            value = getattr(self, key)
            _require(value >= 1, key, value, "an integer of at least 1")
        object.__setattr__(self, "profile_steps", _steps_pair(self.profile_steps))
        _require(self.keep_best >= 0, "keep_best", self.keep_best, "an integer of at least 0")
        _require(0 <= self.seed < 2**32, "seed", self.seed, "an integer in [0, 2**32)")
        if self.eval_batch_size is not None:
            _require(
                self.eval_batch_size >= 1, "eval_batch_size", self.eval_batch_size, "1 or more"
            )
        if self.ema_decay is not None:
            _require(0 <= self.ema_decay < 1, "ema_decay", self.ema_decay, "a number in [0, 1)")
        _require(
            self.batch_size % self.gradient_accumulation == 0,
            "gradient_accumulation",
            self.gradient_accumulation,
            f"a divisor of batch_size, {self.batch_size}",
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns plain nested dicts, lists, strings and numbers: what goes into config.json."""
        return _plain(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ExperimentConfig":
        """Builds a config from nested mappings; absent keys take their defaults.

        Raises:
          ValueError: for a key that does not exist, naming the nearest that does.
          TypeError: for a value of another type than the key's.
        """
        return _build(cls, values, prefix="")

    def replace(self, **changes: Any) -> "ExperimentConfig":
        """Returns a copy with some keys changed; a double underscore goes one level down.

        >>> ExperimentConfig().replace(seed=3, model__attention="linear").model.attention
        'linear'
        """
        return self.from_dict(_nested_update(self.to_dict(), changes))


def _steps_pair(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    parts = value.split(",") if isinstance(value, str) else value
    texts = [str(part).strip() for part in parts]
    is_pair = len(texts) == 2 and all(text.isdecimal() for text in texts)
    is_pair = is_pair and 1 <= int(texts[0]) <= int(texts[1])
    _require(
        is_pair, "profile_steps", value, "two steps such as 10,15, the first not after the last"
    )
    return (int(texts[0]), int(texts[1]))


def difference(old: ExperimentConfig, new: ExperimentConfig) -> list[str]:
    """Lists the keys that differ, as "key: old → new".

    >>> difference(ExperimentConfig(), ExperimentConfig(batch_size=32))
    ['batch_size: 64 → 32']
    """
    olds, news = dict(flat_items(old.to_dict())), dict(flat_items(new.to_dict()))
    absent = "(absent)"
    return [
        f"{key}: {olds.get(key, absent)} → {news.get(key, absent)}"
        for key in [*olds, *(key for key in news if key not in olds)]
        if olds.get(key, absent) != news.get(key, absent)
    ]


def flat_items(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields ("optimizer.learning_rate", value) for every leaf of nested dicts."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat_items(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def unknown_key(key: str, section: Mapping[str, Any], everything: Mapping[str, Any]) -> str:
    """Builds the line for a config key that does not exist.

    Args:
      key: the dotted key that came.
      section: the keys that exist where it was looked for.
      everything: the whole config, searched for the same name in another section.
    """
    prefix = key.rpartition(".")[0]
    known = [f"{prefix}.{name}" if prefix else name for name in section]
    leaf = key.rpartition(".")[2]
    if not difflib.get_close_matches(key, known, n=1, cutoff=0.5):
        leaves = {full.rpartition(".")[2]: full for full, _ in flat_items(everything)}
        known += [leaves[near] for near in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.6)]
    return unknown_name("config key", key, known)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def _nested_update(values: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in changes.items():
        *sections, leaf = key.split("__")
        section = values
        for name in sections:
            section = section.setdefault(name, {})
        section[leaf] = value
    return values


def _build(cls: type, values: Any, *, prefix: str, root: type | None = None) -> Any:
    root = root or cls
    if not isinstance(values, Mapping):
        raise TypeError(f"config key {prefix[:-1]}: got {values!r}, expected a section of keys.")
    hints = typing.get_type_hints(cls)
    names = {field.name: None for field in dataclasses.fields(cls) if field.init}
    arguments = {}
    for key, value in values.items():
        if key not in names:
            raise ValueError(unknown_key(f"{prefix}{key}", names, _plain(root())))
        if dataclasses.is_dataclass(hints[key]):
            value = _build(hints[key], value, prefix=f"{prefix}{key}.", root=root)
        arguments[key] = _checked(value, hints[key], f"{prefix}{key}")
    return cls(**arguments)


def _checked(value: Any, hint: Any, key: str) -> Any:
    """Returns the value, a list made a tuple and an int a float where the hint says so."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    options = typing.get_args(hint) if union else (hint,)
    kinds = tuple(typing.get_origin(option) or option for option in options)
    if Any in kinds:
        return value
    if isinstance(value, list) and tuple in kinds:
        value = _tuples(value)
    if isinstance(value, int) and not isinstance(value, bool) and float in kinds:
        value = value if int in kinds else float(value)
    wrong_bool = isinstance(value, bool) and bool not in kinds
    if wrong_bool or not isinstance(value, kinds):
        expected = " or ".join("None" if k is types.NoneType else k.__name__ for k in kinds)
        raise TypeError(
            f"config key {key}: got {value!r} ({type(value).__name__}), expected {expected}."
        )
    return value


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
