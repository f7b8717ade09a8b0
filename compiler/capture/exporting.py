"""torch.export, tried until it succeeds: a module and example inputs in, an exported program and what had to be changed out.

A model is exported as it is, in training. Where that fails, these are tried in order, each alone; the first that exports is taken
and a note says what it was:
    attention mask    some models make one themselves, but not while they are exported: those are given one of ones
    evaluation        modules whose code asks whether it is training (layers skipped at random, noise, weights clipped in place)
                      are put in evaluation: those that the export failed in, else one class of modules at a time, then all
    experts           the other implementations of experts that transformers has; those whose shapes are static export
    attention         the other implementations of attention
What then still fails is an InputError that names the file and line of the model's code and what depends on data there.

The module is given back as it was.
"""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._pytree import tree_flatten_with_path
from transformers import PreTrainedModel, masking_utils

from meshwright.compiler.capture.functions import own_backwards, recorded_applications
from meshwright.compiler.capture.hooks import no_new_hooks, refuse_hooks
from meshwright.compiler.capture.opaque import opaque_functions
from meshwright.compiler.capture.replicas import replicated_layers
from meshwright.compiler.capture.source import FAILURES, first_line
from meshwright.plans.errors import InputError
from meshwright.plans.patterns import compress

HALVES = (torch.bfloat16, torch.float16)
EXPERTS = ("grouped_mm", "batched_mm")
ATTENTIONS = ("sdpa", "eager")
OWN_PACKAGES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
"""Where the code is not the model's."""


@dataclass(frozen=True)
class Exported:
    """The program, one line for each thing that was changed to get it, and whether layers were left out of it (see replicas.py)."""

    program: torch.export.ExportedProgram
    notes: tuple[str, ...]
    has_copies: bool = False


@dataclass(frozen=True)
class Attempt:
    """A change of the model for the time of an export, and the note for it. `masked`: give an attention mask of ones."""

    change: Callable[[], AbstractContextManager[object]]
    note: str = ""
    masked: bool = False


class LossOnly(nn.Module):
    """The model as a function to its scalar loss. `masked`: an attention mask of ones is made and given. What a 16-bit model reads
    (pixels, features), labels apart, comes in FP32 and is cast."""

    def __init__(self, inner: nn.Module, masked: bool) -> None:
        super().__init__()
        self.inner = inner
        self.masked = masked
        dtypes = [p.dtype for p in inner.parameters() if p.is_floating_point()]
        self.cast_to = dtypes[0] if dtypes and dtypes[0] in HALVES else None

    def forward(self, **inputs: object) -> torch.Tensor:
        for name, item in inputs.items() if self.cast_to is not None else ():
            if isinstance(item, torch.Tensor) and item.dtype == torch.float32 and "labels" not in name:
                inputs[name] = item.to(self.cast_to)
        ids = inputs.get("input_ids")
        if self.masked and isinstance(ids, torch.Tensor):
            inputs["attention_mask"] = torch.ones_like(ids)
        return find_loss(self.inner(**inputs))


def find_loss(output: object) -> torch.Tensor:
    """The scalar loss of a model's output: the output itself, its `loss`, or its first item."""
    loss = output
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif isinstance(output, (tuple, list)) and output:
        loss = output[0]
    elif not isinstance(output, torch.Tensor):
        loss = getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(output).__name__
        raise InputError(
            f"the model gave no scalar loss (found {found}): its example inputs must include labels, "
            f"and it must return a loss, an output with `.loss`, or a tuple that starts with the loss"
        )
    return loss.reshape(())


def export(
    module: nn.Module, example: Mapping[str, object], quiet_modules: frozenset[str] = frozenset(), replicate: bool = True
) -> Exported:
    """Exports the loss of `module` on example keyword arguments; `quiet_modules` (paths) are in evaluation throughout.
    `replicate`: leave layers out that are alike (see replicas.py)."""
    failures: list[BaseException] = []
    with in_evaluation([module.get_submodule(path) for path in quiet_modules]):
        for attempt in _attempts(module, example, failures):
            try:
                with attempt.change():
                    program, has_copies = _export_once(module, example, attempt.masked, replicate)
            except FAILURES as error:
                if not failures and isinstance(error, InputError):
                    raise
                failures.append(error)
            else:
                return Exported(program, (attempt.note,) if attempt.note else (), has_copies)
    raise _refusal(failures[0]) from failures[0]


def _export_once(
    module: nn.Module, example: Mapping[str, object], masked: bool, replicate: bool
) -> tuple[torch.export.ExportedProgram, bool]:
    """The program, and whether layers were left out of it."""
    refuse_hooks(module)
    with _masks_as_when_run(), no_new_hooks():
        with recorded_applications(module) as applications:
            found = _program(module, example, masked, replicate)
        kept = own_backwards(applications)
        if not kept:
            return found
        with opaque_functions(kept):
            return _program(module, example, masked, replicate)


def _program(
    module: nn.Module, example: Mapping[str, object], masked: bool, replicate: bool
) -> tuple[torch.export.ExportedProgram, bool]:
    """torch.export, with every layer where it does not work with fewer."""
    if replicate:
        with replicated_layers(module) as replication:
            try:
                program = torch.export.export(LossOnly(module, masked), (), dict(example), strict=False)
            except FAILURES:
                if not replication.originals:
                    raise
            else:
                if not replication.broken:
                    return program, replication.num_copies > 0
    return torch.export.export(LossOnly(module, masked), (), dict(example), strict=False), False


@contextlib.contextmanager
def _masks_as_when_run() -> Iterator[None]:
    """While active, transformers leaves a mask out wherever it does so when the model runs.

    While a model is exported it makes all masks, for a batch with padding might come later. That is not only slower: attention without
    a mask is causal where its module says so, whatever the mask that was left out would have said.
    """
    names = vars(masking_utils)
    asked = names["is_torchdynamo_exporting"]
    names["is_torchdynamo_exporting"] = lambda: False
    try:
        yield
    finally:
        names["is_torchdynamo_exporting"] = asked


def _attempts(module: nn.Module, example: Mapping[str, object], failures: list[BaseException]) -> Iterator[Attempt]:
    """What to try next, given how all before it failed."""
    yield Attempt(contextlib.nullcontext)
    takes_mask = "attention_mask" in inspect.signature(module.forward).parameters and "attention_mask" not in example
    if takes_mask and "NoneType" in str(failures[0]):
        yield Attempt(contextlib.nullcontext, masked=True)
    yield from _evaluation_attempts(module, failures)
    if isinstance(module, PreTrainedModel):
        yield from _implementation_attempts(module, failures[0])


def _evaluation_attempts(module: nn.Module, failures: list[BaseException]) -> Iterator[Attempt]:
    """Modules that ask whether they train in evaluation: first the class that failed, with each failure one class more, then every
    class alone, then all."""
    asking: dict[type[nn.Module], list[str]] = {}
    for path, child in module.named_modules():
        if _asks_for_training(type(child)):
            asking.setdefault(type(child), []).append(path)

    def attempt(classes: Collection[type[nn.Module]]) -> Attempt:
        paths = [path for cls in classes for path in asking[cls]]
        modules = [module.get_submodule(path) for path in paths]
        note = f"{evaluation_note(paths)}, for in training {_what_fails(failures[0])}"
        return Attempt(lambda: in_evaluation(modules), note)

    failed: list[type[nn.Module]] = []
    while owner := next((type(o) for o in _owners(failures[-1]) if type(o) in asking and type(o) not in failed), None):
        failed.append(owner)
        yield attempt(failed)
    for cls in asking:
        if [cls] != failed[:1]:
            yield attempt([cls])
    if len(asking) > 1:
        yield attempt(asking)


def evaluation_note(paths: Collection[str]) -> str:
    """That modules are captured as in evaluation."""
    inner = compress([path for path in paths if path])
    named = [*(["the model"] if "" in paths else []), *inner]
    return f"{', '.join(named)}: captured as in evaluation, with no noise or dropout of its own"


def _asks_for_training(cls: type[nn.Module]) -> bool:
    """Whether the class's own code reads `self.training`, other than torch's."""
    if cls.__module__.startswith("torch."):
        return False
    try:
        return "self.training" in inspect.getsource(cls)
    except (OSError, TypeError):
        return False


def _implementation_attempts(module: PreTrainedModel, failure: BaseException) -> Iterator[Attempt]:
    settings = (
        ("experts", "_experts_implementation", EXPERTS, module.set_experts_implementation),
        ("attention", "_attn_implementation", ATTENTIONS, module.set_attn_implementation),
    )
    for what, attribute, names, choose in settings:
        current = getattr(module.config, attribute, None)
        for name in names:
            if name != current and current is not None:
                note = f"{what}: implementation {name} instead of {current}, for there {_what_fails(failure)}"
                yield Attempt(lambda choose=choose, name=name, current=current: _chosen(choose, name, current), note)  # type: ignore[misc]


@contextlib.contextmanager
def _chosen(choose: Callable[[str], None], name: str, before: str) -> Iterator[None]:
    choose(name)
    try:
        yield
    finally:
        choose(before)


@contextlib.contextmanager
def in_evaluation(modules: list[nn.Module]) -> Iterator[None]:
    """While active, these modules, not those inside them, are in evaluation."""
    before = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, training in zip(modules, before, strict=True):
            module.training = training


# what went wrong


def _refusal(error: BaseException) -> InputError:
    where = _model_line(error)
    if not isinstance(error, GuardOnDataDependentSymNode):
        return InputError(f"torch.export cannot trace this model in training: {first_line(error)}{f' (at {where})' if where else ''}")
    return InputError(
        f"{where or 'the model'}: what runs there depends on the data, so that no fixed program can be made of it ({first_line(error)}); "
        f"a setting of the model that avoids this, a static form of this code, or a torch.library.custom_op around it would work"
    )


def _what_fails(error: BaseException) -> str:
    """A failure in a few words, for a note."""
    where = _model_line(error)
    what = "control flow depends on data or chance" if isinstance(error, GuardOnDataDependentSymNode) else "torch.export fails"
    return f"{what} ({where})" if where else what


def _model_line(error: BaseException) -> str:
    """`file:line` of the innermost code of the model that the error came through; empty when it came through none."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((*OWN_PACKAGES, "<"))]
    return f"{_short(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""


def _short(file: str) -> str:
    """A file's path from its installed package on."""
    return file.rpartition("site-packages/")[2]


def _owners(error: BaseException) -> list[nn.Module]:
    """The modules whose methods the error came through, innermost first."""
    found = []
    step = error.__traceback__
    while step is not None:
        owner = step.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            found.append(owner)
        step = step.tb_next
    return found[::-1]


# inputs


def flat_example(example: Mapping[str, object]) -> dict[str, object]:
    """Example arguments by the name of the graph's input: nested dicts, tuples and lists are joined with underscores
    (`states.full.0` is states_full_0). Items that are no tensors stay among them: they are part of the program."""
    leaves, _ = tree_flatten_with_path(dict(example))
    return {"_".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path): leaf for path, leaf in leaves}
