"""Where a model comes from: the text a user gives as MODEL, resolved to a `ModelSource`, and its configuration.

Kinds
    directory  a directory with config.json and weights; without weights it is its config.json
    config     a config.json alone
    gguf       a .gguf file
    factory    `package.module:factory`, a callable that returns an nn.Module or (module, example_kwargs)
    hub        a Hugging Face hub id
    module     an nn.Module object, given to `compile` from Python

Task  the model class is transformers' own choice for (configuration class, task); `task_of` reads the task from the
      configuration's architectures. Every failure is an `InputError`: what was asked, what was found, what would work.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from logging import getLogger
from pathlib import Path
from typing import Protocol

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.utils import logging

from meshwright.plans.errors import InputError

FAILURES = (
    OSError,
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    ImportError,
    StrictDataclassError,
)
"""What the code of a model or its configuration may raise on bad input."""


class AutoClass(Protocol):
    """What is used of transformers' AutoModelFor... classes."""

    @classmethod
    def from_config(cls, config: PretrainedConfig, **kwargs: object) -> object: ...

    @classmethod
    def from_pretrained(cls, path: str, **kwargs: object) -> object: ...


@dataclass(frozen=True)
class Task:
    """A task: transformers' auto class and mapping, the labels and the inputs.

    labels  "tokens": (B, S); "sequence": (B,); "span": start and end positions, (B,) each
    inputs  "tokens": input_ids (B, S); "pixels": (B, channels, height, width); "features": (B, mel bins, frames)
    """

    auto: str
    mapping: str
    labels: str
    inputs: str = "tokens"


TASKS = {
    "causal-lm": Task("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "tokens"),
    "masked-lm": Task("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES", "tokens"),
    "seq2seq-lm": Task("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "tokens"),
    "sequence-classification": Task(
        "AutoModelForSequenceClassification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", "sequence"
    ),
    "token-classification": Task("AutoModelForTokenClassification", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES", "tokens"),
    "question-answering": Task("AutoModelForQuestionAnswering", "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES", "span"),
    "image-classification": Task(
        "AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", "sequence", "pixels"
    ),
    "speech-seq2seq": Task("AutoModelForSpeechSeq2Seq", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", "tokens", "features"),
}


ATTENTIONS = ("sdpa", "eager")


CUSTOM = "custom"
"""The task of a plan whose model is of no task here: a factory, a module object, a class that transformers has no auto class for."""


@dataclass(frozen=True)
class ModelSource:
    """A model, found but not built. `source` is absolute for files; `task` is None when no configuration names one."""

    source: str
    kind: str
    task: str | None = None
    attention: str = "sdpa"
    has_weights: bool = False

    @property
    def directory(self) -> str:
        """What transformers loads from: the directory of a file, else the source itself."""
        return str(Path(self.source).parent) if self.kind in ("gguf", "config") else self.source

    @property
    def gguf_file(self) -> str | None:
        return Path(self.source).name if self.kind == "gguf" else None


def find_source(text: str, task: str | None = None, attention: str = "sdpa") -> ModelSource:
    """The MODEL argument as a ModelSource, its task resolved."""
    return find_configured(text, task, attention)[0]


def find_configured(text: str, task: str | None = None, attention: str = "sdpa") -> tuple[ModelSource, PretrainedConfig | None]:
    """The MODEL argument as a ModelSource, with the configuration that was read to resolve its task (None: a factory)."""
    custom = task == CUSTOM
    task = None if custom else task
    if task is not None and task not in TASKS:
        raise InputError(f"task: found {task!r}, expected one of {', '.join(TASKS)}")
    if attention not in ATTENTIONS:
        raise InputError(f"attention: found {attention!r}, expected one of {', '.join(ATTENTIONS)}")
    kind, source, has_weights = _classify(text)
    found = ModelSource(source, kind, task, attention, has_weights)
    if kind == "factory":
        return found, None
    config = load_config(found)
    return (found if custom else replace(found, task=task_of(config, source, task))), config


def _classify(text: str) -> tuple[str, str, bool]:
    """(kind, source, has weights) of a MODEL argument."""
    path = Path(text).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            ggufs = sorted(path.glob("*.gguf"))
            hint = f"give {ggufs[0]}" if ggufs else "give a directory that transformers' save_pretrained wrote"
            raise InputError(f"{text}: no config.json in this directory; {hint}")
        weights = any(any(path.glob(pattern)) for pattern in ("*.safetensors", "pytorch_model*.bin"))
        source = path.resolve()
        return ("directory", str(source), True) if weights else ("config", str(source / "config.json"), False)
    if path.is_file():
        if path.suffix == ".gguf":
            return "gguf", str(path.resolve()), True
        if path.suffix == ".json":
            return "config", str(path.resolve()), False
        raise InputError(f"{text}: expected a config.json or a .gguf file, found a {path.suffix or 'plain'} file")
    if path.suffix in (".json", ".gguf") or path.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1:
        raise InputError(f"{text}: no such file or directory")
    if ":" in text:
        return "factory", text, True
    return "hub", text, True


def load_config(source: ModelSource) -> PretrainedConfig:
    """The transformers configuration of a directory, config, gguf or hub source."""
    if source.kind == "config":
        _check_config_file(Path(source.source))
    elif source.kind == "directory":
        _check_config_file(Path(source.source) / "config.json")
    options = {"gguf_file": source.gguf_file} if source.kind == "gguf" else {}
    path = source.directory if source.kind == "gguf" else source.source
    try:
        with quiet():
            config = AutoConfig.from_pretrained(path, **options)
    except FAILURES as error:
        raise InputError(_config_error(source, error)) from error
    if not isinstance(config, PretrainedConfig):
        raise InputError(f"{source.source}: transformers gave a {type(config).__name__}, not a model configuration")
    return config


def _check_config_file(path: Path) -> None:
    """A config.json is a JSON object with a model_type that transformers knows."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise InputError(f"{path}: no `model_type` in it; a transformers configuration names its model_type")
    if content["model_type"] not in transformers.CONFIG_MAPPING and "auto_map" not in content:
        raise InputError(
            f"{path}: model_type {content['model_type']!r} is not an architecture that "
            f"transformers {transformers.__version__} knows"
        )


def _config_error(source: ModelSource, error: BaseException) -> str:
    """One line for a configuration that transformers could not load."""
    first = first_line(error)
    if source.kind == "hub":
        return (
            f"{source.source}: not a file or directory, and not found as a hub id ({first}); give a directory with "
            f"config.json, a config.json, a .gguf file, package.module:factory, or a hub id that is cached or reachable"
        )
    return f"{source.source}: transformers cannot load this configuration: {first}"


def first_line(error: BaseException) -> str:
    """An exception in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def task_of(config: PretrainedConfig, where: str, task: str | None = None) -> str:
    """The task asked for, else the one of the configuration's architectures, else the first that this model type has."""
    names = {name: getattr(modeling_auto, entry.mapping).get(config.model_type) for name, entry in TASKS.items()}
    able = [name for name, classes in names.items() if classes is not None]
    if task is not None:
        if task not in able:
            known = ", ".join(able) or "none"
            raise InputError(f"{where}: model type {config.model_type!r} has no {task} model; tasks it has: {known}")
        return task
    if (own := task_of_class(config)) is not None:
        return own
    if config.is_encoder_decoder and "seq2seq-lm" in able:
        return "seq2seq-lm"
    if not able:
        raise InputError(
            f"{where}: model type {config.model_type!r} has a model for none of {', '.join(TASKS)}; "
            f"give package.module:factory, a callable that returns (module, example_kwargs)"
        )
    return able[0]


def task_of_class(config: PretrainedConfig) -> str | None:
    """The task whose auto class makes the configuration's own architecture; None when there is none."""
    for architecture in config.architectures or ():
        for name, entry in TASKS.items():
            classes = getattr(modeling_auto, entry.mapping).get(config.model_type)
            if architecture == classes or (isinstance(classes, (tuple, list)) and architecture in classes):
                return name
    return None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """While active, transformers logs errors alone and draws no progress bars; off a terminal, nothing is written to stderr."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    hub = getLogger("huggingface_hub")
    hub_level = hub.level
    hub.setLevel("CRITICAL")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    hidden = contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO())
    try:
        with hidden:
            yield
    finally:
        logging.set_verbosity(verbosity)
        hub.setLevel(hub_level)
        if bars:
            logging.enable_progress_bar()


def auto_class(task: str) -> AutoClass:
    """transformers' auto class of a task."""
    found: AutoClass = getattr(transformers, TASKS[task].auto)
    return found


def architecture_class(config: PretrainedConfig, where: str) -> type[PreTrainedModel]:
    """transformers' class of the configuration's own architecture."""
    name = (config.architectures or [""])[0]
    found = getattr(transformers, name, None)
    if not isinstance(found, type) or not issubclass(found, PreTrainedModel):
        raise InputError(f"{where}: transformers has no model class {name!r}, which the configuration names as its architecture")
    return found
