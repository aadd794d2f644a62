"""Sections of a recipe: frozen pydantic models that refuse unknown keys; `recipe_draft` has the draft's. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    create_model,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from specflow.length import POLICIES
from specflow.rules import RULE_INFOS, RuleInfo

__all__ = [
    "Choice",
    "CostsSection",
    "LengthSection",
    "RuntimeSection",
    "Section",
    "TargetSection",
    "TuneRange",
    "VerifySection",
    "fault",
    "length_sections",
    "plain_length",
    "plain_verify",
    "section_of",
    "verify_sections",
]


def fault(key: str, found: str, expected: str, choices: tuple[str, ...] = ()) -> PydanticCustomError:
    """An error that keeps what the loader needs: key (relative, dotted), found, expected, valid names."""
    context = {"key": key, "found": found, "expected": expected, "choices": choices}
    return PydanticCustomError("recipe", "{found}; expected {expected}", context)


class Section(BaseModel):
    """Base of all sections."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TargetSection(Section):
    """The model whose text is produced, and where it runs."""

    model: str = Field("smollm2-135m", min_length=1, description="embedded model, HF id, local folder or .gguf file")
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64", "int8", "int4"] = Field(
        "auto", description="type of the weights; int8 and int4 are float32 with quantised weights, as ONNX graphs"
    )
    runtime: Literal["auto", "torch", "onnx", "openvino"] = Field(
        "auto", description="what computes it: torch, ONNX Runtime or OpenVINO; auto measures once on a CPU"
    )
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?|mps)$", description="auto, cpu, cuda, cuda:0, mps")
    implementation: Literal["auto", "native", "transformers"] = Field("auto", description="which decoder computes it")
    row_invariant: Literal["auto", True, False] = Field(
        "auto", description="a row has the same bits for any number of rows, so speculation equals plain decoding"
    )
    revision: str | None = Field(None, description="branch, tag or commit of an HF id")
    trust_remote_code: bool = Field(False, description="run Python code that comes with the model")
    threads: int | None = Field(None, ge=1, description="CPU threads; null leaves the choice to torch")

    @property
    def quantization(self) -> str | None:
        """The dtype where it is one of quantised weights."""
        return self.dtype if self.dtype in ("int8", "int4") else None

    @model_validator(mode="after")
    def _one_runtime(self) -> TargetSection:
        if self.runtime in ("onnx", "openvino") and self.implementation == "transformers":
            found = f"{self.runtime} with implementation: transformers"
            raise fault("runtime", found, "runtime: torch, or implementation: auto")
        if self.quantization and self.runtime == "torch":
            raise fault("runtime", f"torch with dtype: {self.dtype}", "runtime: onnx or auto for quantised weights")
        return self


class VerifySection(Section):
    """Which rule decides what is kept of a block. Every rule has its own subclass (see `verify_sections`)."""

    rule: str
    lossless: bool = Field(True, description="false admits rules that change the law of the text")

    @property
    def info(self) -> RuleInfo:
        """What the rule says about itself."""
        return RULE_INFOS[self.rule]

    @property
    def lossy(self) -> bool:
        """Whether the rule changes the law of the text."""
        return self.info.lossy

    @property
    def options(self) -> dict[str, Any]:
        """The rule's own arguments."""
        return {name: getattr(self, name) for name in self.info.config.model_fields}

    @model_validator(mode="after")
    def _said_so(self) -> VerifySection:
        if self.lossy and self.lossless:
            found = f"true with rule {self.rule}, which changes the law of the text"
            raise fault("lossless", found, "lossless: false")
        return self


@cache
def verify_sections() -> dict[str, type[VerifySection]]:
    """Rule name -> its verify section: the rule's config, its name, and whether the text may change its law."""
    return {name: _verify_section(name, info.config) for name, info in RULE_INFOS.items()}


def _verify_section(name: str, config: type[BaseModel]) -> type[VerifySection]:
    fields: Any = {"rule": (Literal[name], Field(name, description="how a block is verified"))}
    section: type[VerifySection] = section_of(f"{name}_verify", (config, VerifySection), fields)
    return section


def plain_verify() -> VerifySection:
    """The verify section of a recipe that has none."""
    return verify_sections()["match"].model_validate({})


class LengthSection(Section):
    """How many tokens a round drafts, up to `draft.k`. Every policy has its own subclass (see `length_sections`)."""

    policy: str
    until: int | None = Field(None, ge=1, description="committed tokens from which on rounds are plain; null: none")

    @property
    def options(self) -> dict[str, Any]:
        """The policy's own arguments, all but k."""
        return {name: getattr(self, name) for name in POLICIES[self.policy].config.model_fields}


@cache
def length_sections() -> dict[str, type[LengthSection]]:
    """Policy name -> its length section: the policy's config and its name."""
    return {name: _length_section(name, policy.config) for name, policy in POLICIES.items()}


def _length_section(name: str, config: type[BaseModel]) -> type[LengthSection]:
    fields: Any = {"policy": (Literal[name], Field(name, description="how the length is chosen"))}
    section: type[LengthSection] = section_of(f"{name}_length", (config, LengthSection), fields)
    return section


def section_of(name: str, bases: tuple[type[BaseModel], ...], fields: dict[str, Any]) -> Any:
    """A section model made of a part's own config and the section's common keys."""
    title = "".join(word.title() for word in re.split(r"\W|_", name))
    return create_model(title, __base__=bases, __doc__=bases[0].__doc__, **fields)


def plain_length() -> LengthSection:
    """The length section of a recipe that has none."""
    return length_sections()["fixed"].model_validate({})


class CostsSection(Section):
    """Measured seconds of rounds, and where they were measured; `specflow tune` writes it.

    A line of a table: size (rows of a pass, or deepest draft position), batch, context, seconds (median, p25, p75),
    repeats.
    """

    target: Mapping[str, str] = Field(description="name, dtype, device and runtime of the target")
    draft: str | None = Field(None, description="digest of the draft section without any k")
    machine: Mapping[str, str | int | None] = Field(description="facts that decide speed")
    passes: tuple[str, ...] = Field(description="target passes over chains, by rows")
    drafts: tuple[str, ...] = Field((), description="drafts, by deepest position")
    own_blocks: tuple[str, ...] = Field((), description="passes over the drafter's own blocks, where they branch")
    overhead: tuple[str, ...] = Field((), description="what rounds spend outside drafts and passes")
    nodes: Mapping[str, int] = Field(default_factory=dict, description="deepest position -> nodes of a block")


class RuntimeSection(Section):
    """How requests share the machine."""

    batch: int = Field(1, ge=1, description="requests decoded together")
    context: int | None = Field(None, ge=2, description="most positions of a request; null is the model's own limit")
    prefill_chunk: int = Field(512, ge=1, description="prompt tokens scored in one pass")
    costs: CostsSection | None = Field(None, description="measured costs for length policies that weigh them")


class TuneRange(Section):
    """Values a tuner may give one key: either a list of choices, or a range."""

    choices: tuple[bool | int | float | str | None, ...] | None = Field(None, min_length=1, description="values to try")
    low: int | float | None = Field(None, description="smallest value of a range")
    high: int | float | None = Field(None, description="largest value of a range")
    step: int | float | None = Field(None, gt=0, description="distance between values of a range")

    @model_validator(mode="after")
    def _one_form(self) -> TuneRange:
        ends = (self.low, self.high)
        if self.choices is not None:
            if ends != (None, None) or self.step is not None:
                raise fault("choices", "choices and a range together", "one of the two")
        elif self.low is None or self.high is None:
            raise fault("", "neither choices nor both ends of a range", "choices: [...], or low and high")
        elif self.low > self.high:
            raise fault("low", f"low {self.low} above high {self.high}", "low <= high")
        return self

    @property
    def ends(self) -> tuple[bool | int | float | str | None, ...]:
        """Values that stand for all others when a recipe is checked: every choice, or both ends."""
        return self.choices if self.choices is not None else (self.low, self.high)


class Choice:
    """Annotation: one of several section models, chosen by the value of one key."""

    def __init__(
        self,
        key: str,
        sections: Callable[[], Mapping[str, type[Section]]],
        default: str | None = None,
        expand: Callable[[Any], Any] | None = None,
    ) -> None:
        self.key = key
        self.sections = sections
        self._default = default
        self._expand = expand

    def tag(self, value: Any) -> Any:
        """The chosen name of raw data or of a section."""
        if isinstance(value, Mapping):
            return value.get(self.key, self._default)
        return getattr(value, self.key, self._default)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        choices = {name: handler.generate_schema(section) for name, section in self.sections().items()}
        union = core_schema.tagged_union_schema(choices, discriminator=self.tag)
        return union if self._expand is None else core_schema.no_info_before_validator_function(self._expand, union)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Any of the sections: without the key that chooses, several fit."""
        found = handler(schema)
        return {"anyOf": found.pop("oneOf"), **found} if "oneOf" in found else found
