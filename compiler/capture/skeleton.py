"""Models, built two ways.

    build_skeleton   for capture: parameters are FakeTensors (no memory, any size), buffers are real tensors on the CPU,
                     so that the export bakes `cpu` in and constants can be evaluated. A model that transformers builds has the
                     asked dtype, as if it had been loaded in it; what a factory makes has its own
    build_model      for verify and materialize: the real model in float32, from its weights or initialised from the seed

Both are in train mode with the caches off and the experts in the form whose shapes are static.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PretrainedConfig

from meshwright.compiler.capture.source import (
    FAILURES,
    TASKS,
    ModelSource,
    architecture_class,
    auto_class,
    first_line,
    load_config,
    quiet,
)
from meshwright.plans.errors import InputError

HUGE_NUMEL = 1 << 26
"""Tensors made with more elements than this while a skeleton is built are fake from the start, buffers included."""


@dataclass(frozen=True)
class Built:
    """A module with the keyword arguments to trace it with (None: the task's default) and its configuration, if any."""

    module: nn.Module
    example: dict[str, object] | None
    config: PretrainedConfig | None


def build_skeleton(source: ModelSource, config: PretrainedConfig | None = None, dtype: torch.dtype = torch.float32) -> Built:
    """The model with fake parameters and real buffers; `config` is the source's configuration if it was read already."""
    with _fake_parameters():
        return _build(source, config, dtype)


def build_model(source: ModelSource, seed: int, config: PretrainedConfig | None = None) -> nn.Module:
    """The real model in float32: its weights where it has some, else transformers' own initialisation from `seed`.

    `config` is the source's configuration if it was read already.
    """
    with quiet():
        torch.manual_seed(seed)
        return _build_real(source, config)


def _build_real(source: ModelSource, config: PretrainedConfig | None) -> nn.Module:
    if source.kind == "factory" or not source.has_weights:
        return _build(source, config).module.float()
    config = prepare_config(config or load_config(source), source.source, source.task)
    options = {"gguf_file": source.gguf_file} if source.kind == "gguf" else {}
    maker = architecture_class(config, source.source) if source.task is None else auto_class(source.task)
    load: Callable[..., object] = maker.from_pretrained
    try:
        module = load(
            source.directory, config=config, dtype=torch.float32, **_implementations(source), **options
        )
    except FAILURES as error:
        raise InputError(f"{source.source}: transformers cannot load these weights: {first_line(error)}") from error
    return _ready(module, source)


def _build(source: ModelSource, config: PretrainedConfig | None = None, dtype: torch.dtype = torch.float32) -> Built:
    """The model from its factory or configuration, in whatever parameter mode is active."""
    if source.kind == "factory":
        return _call_factory(source)
    config = prepare_config(config or load_config(source), source.source, source.task)
    make: Callable[..., object]
    make = architecture_class(config, source.source)._from_config if source.task is None else auto_class(source.task).from_config
    try:
        module = make(config, dtype=dtype, **_implementations(source))
    except FAILURES as error:
        raise InputError(f"{source.source}: transformers cannot build this model: {first_line(error)}") from error
    return Built(_ready(module, source), None, config)


def _implementations(source: ModelSource) -> dict[str, str]:
    """transformers' own defaults are sdpa and grouped_mm where the model has them."""
    return {} if source.attention == "sdpa" else {"attn_implementation": source.attention}


def _ready(module: object, source: ModelSource) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise InputError(f"{source.source}: expected an nn.Module, found a {type(module).__name__}")
    return module.train()


def prepare_config(config: PretrainedConfig, where: str, task: str | None) -> PretrainedConfig:
    """Settings that training needs, made on the configuration itself: caches off, a decoder start and a padding token."""
    config.use_cache = False
    text = config.get_text_config()
    text.use_cache = False
    if task == "seq2seq-lm" and getattr(config, "decoder_start_token_id", None) is None:
        pad = getattr(config, "pad_token_id", None)
        if pad is None:
            raise InputError(f"{where}: the configuration has neither decoder_start_token_id nor pad_token_id; set one")
        config.decoder_start_token_id = pad
    if task == "sequence-classification" and getattr(text, "pad_token_id", None) is None:
        text.pad_token_id = 0
    return config


def _call_factory(source: ModelSource) -> Built:
    """Imports `package.module:factory` and calls it."""
    module_name, _, attribute = source.source.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (*FAILURES, ImportError, SyntaxError, NameError) as error:
        raise InputError(f"{source.source}: cannot import {module_name!r}: {first_line(error)}") from error
    if not hasattr(module, attribute):
        raise InputError(f"{source.source}: module {module_name!r} has no {attribute!r}")
    factory = getattr(module, attribute)
    if not callable(factory):
        raise InputError(f"{source.source}: {attribute!r} is a {type(factory).__name__}, not a callable")
    try:
        made = factory()
    except FAILURES as error:
        raise InputError(f"{source.source}: the factory failed: {first_line(error)}") from error
    example = None
    if isinstance(made, tuple):
        if len(made) != 2 or not isinstance(made[1], dict):
            raise InputError(f"{source.source}: expected nn.Module or (nn.Module, example_kwargs) from the factory")
        made, example = made
    built = _ready(made, source)
    config = getattr(built, "config", None)
    return Built(built, example, config if isinstance(config, PretrainedConfig) else None)


def default_example(task: str, config: PretrainedConfig, micro_batch: int, seq: int) -> dict[str, object]:
    """Inputs and labels for a task. No tensor twice: one object given twice would be traced as one input."""
    entry = TASKS[task]
    example: dict[str, object] = {}
    if entry.inputs == "pixels":
        example["pixel_values"] = torch.zeros(micro_batch, *_image_sizes(config))
    elif entry.inputs == "features":
        frames = 2 * _size(config, "max_source_positions")
        example["input_features"] = torch.zeros(micro_batch, _size(config, "num_mel_bins"), frames)
    else:
        example["input_ids"] = torch.zeros(micro_batch, seq, dtype=torch.int64)
    if entry.labels == "tokens":
        example["labels"] = torch.ones(micro_batch, seq, dtype=torch.int64)
    elif entry.labels == "span":
        example.update({name: torch.ones(micro_batch, dtype=torch.int64) for name in ("start_positions", "end_positions")})
    else:
        example["labels"] = torch.ones(micro_batch, dtype=torch.float32 if config.num_labels == 1 else torch.int64)
    return example


def _image_sizes(config: PretrainedConfig) -> tuple[int, int, int]:
    """(channels, height, width) of the images of a configuration, or of its vision tower."""
    tower = getattr(config, "vision_config", config)
    sizes = getattr(tower, "image_size", None)
    height, width = sizes if isinstance(sizes, (list, tuple)) else (_size(tower, "image_size"),) * 2
    return getattr(tower, "num_channels", 3), height, width


def _size(config: PretrainedConfig, name: str) -> int:
    found = getattr(config, name, None)
    if not isinstance(found, int):
        raise InputError(
            f"the {config.model_type} configuration has no {name}, so that the sizes of its inputs are not known; "
            f"give package.module:factory, a callable that returns (module, example_kwargs)"
        )
    return found


class _HugeFactories(TorchDispatchMode):
    """Makes the huge tensors of a model's constructor fake: even untouched memory is refused at terabytes."""

    MAKERS = frozenset({"empty", "zeros", "ones", "full", "rand", "randn", "empty_strided"})

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = fake

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        if name in self.MAKERS and args and isinstance(args[0], (list, tuple)):
            numel = 1
            for size in args[0]:
                numel *= size
            if numel > HUGE_NUMEL:
                with self.fake:
                    return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _fake_parameters() -> Iterator[None]:
    """While active, every parameter that is registered becomes a FakeTensor on the CPU; buffers stay real."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    register = nn.Module.register_parameter
    made = WeakIdKeyDictionary()

    def register_fake(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is None or isinstance(param, FakeTensor):
            return register(self, name, param)
        if param not in made:
            with fake:
                data = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype)
                made[param] = nn.Parameter(data, requires_grad=param.requires_grad)
            made[param]._is_hf_initialized = True  # transformers' initialisation then leaves it alone
        register(self, name, made[param])

    convert = nn.Module._apply
    nn.Module.register_parameter = register_fake  # type: ignore[method-assign]
    nn.Module._apply = _convert_fake  # type: ignore[method-assign]
    try:
        with _HugeFactories(fake):
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        nn.Module._apply = convert  # type: ignore[method-assign]


def _convert_fake(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """nn.Module._apply (float(), to() ...) by new parameters: torch would swap FakeTensors, which others may hold."""
    if recurse:
        for child in self.children():
            child._apply(fn)
    with torch.no_grad():
        for name, param in self._parameters.items():
            converted = fn(param) if param is not None else None
            if param is not None and converted is not None and converted is not param:
                self._parameters[name] = nn.Parameter(converted, param.requires_grad)
        for name, buffer in self._buffers.items():
            self._buffers[name] = fn(buffer) if buffer is not None else None
    return self
