"""model/signature.json: what a plan directory knows of the model besides its configuration.

    inputs       of one micro-batch, dim 0 being the micro-batch
    parameters   that are trained or read, by the model's own name; a tied parameter once
    tied         {other name: name in parameters}
    unused       parameters that the loss does not depend on; checkpoints take them from the weights as they are
    vocab_size   None when the model has no vocabulary
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Sizes = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class InputSpec(_Frozen):
    """A model input; `dtype` is torch's name without prefix."""

    name: str
    shape: Sizes
    dtype: str


class ParameterSpec(_Frozen):
    """A parameter's full shape."""

    shape: Sizes
    dtype: str
    trainable: bool = True


class Signature(_Frozen):
    """The whole file."""

    inputs: Annotated[tuple[InputSpec, ...], Field(strict=False)]
    parameters: Mapping[str, ParameterSpec]
    tied: Mapping[str, str] = {}
    vocab_size: int | None = None
    unused: Mapping[str, ParameterSpec] = {}

    def to_json(self) -> str:
        """Text of model/signature.json."""
        return self.model_dump_json(indent=1) + "\n"
