"""The script that runs a recipe with transformers, and what a script of others says. No torch."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

from specflow.errors import RecipeError

__all__ = ["SCRIPT", "Said", "read_script"]

SCRIPT = '''HEAD

import sys

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, set_seed

CONSTANTS


def load():
    """Tokenizer, target and assistant. What an assistant reads of its drafts stands in its own generation config."""
    device = DEVICE if DEVICE != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    model = AutoModelForCausalLM.from_pretrained(TARGET, **LOADING).to(device).eval()
    assistant = None
    if ASSISTANT is not None:
        kind = AutoModel if "speculation_type" in SETTINGS else AutoModelForCausalLM
        assistant = kind.from_pretrained(ASSISTANT).to(device, model.dtype).eval()
    (model if assistant is None else assistant).generation_config.update(**DRAFTING)
    return tokenizer, model, assistant


def assisting(tokenizer, model, assistant):
    """What `generate` wants beside the settings: both tokenizers where the vocabularies differ."""
    asked = {"tokenizer": tokenizer} if "stop_strings" in SETTINGS else {}
    if assistant is None:
        return asked
    asked["assistant_model"] = assistant
    if "speculation_type" in SETTINGS:
        return asked
    other = AutoTokenizer.from_pretrained(ASSISTANT)
    if model.config.get_text_config().vocab_size != assistant.config.get_text_config().vocab_size:
        return {**asked, "tokenizer": tokenizer, "assistant_tokenizer": other}
    theirs = other.get_vocab()
    differ = [token for token, number in tokenizer.get_vocab().items() if theirs.get(token) != number]
    if differ:
        raise SystemExit(f"{ASSISTANT}: {len(differ)} tokens have other ids than in {TARGET}, for example {differ[:3]}")
    return asked


def generate(prompt):
    """The text after a prompt."""
    tokenizer, model, assistant = load()
    chat = [{"role": "user", "content": prompt}]
    if tokenizer.chat_template is None:
        inputs = tokenizer(prompt, return_tensors="pt")
    else:
        inputs = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    config = GenerationConfig(**SETTINGS)
    if STOP_IDS:
        own = model.generation_config.eos_token_id
        config.eos_token_id = [*(own if isinstance(own, list) else [] if own is None else [own]), *STOP_IDS]
    if SEED is not None:
        set_seed(SEED)
    asked = assisting(tokenizer, model, assistant)
    tokens = model.generate(**inputs.to(model.device), generation_config=config, **asked)
    return tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


if __name__ == "__main__":
    print(generate(" ".join(sys.argv[1:]) or sys.stdin.read()))
'''
"""`HEAD` and `CONSTANTS` are replaced. Everything that depends on the recipe stands in the constants."""

_LONGEST = 1 << 20


@dataclass
class Said:
    """What a script says about `generate`.

    Attributes:
        target: Hub id or folder of the model; None where the script does not say it plainly.
        assistant: The same of the assistant; "" where there is one without a name.
        settings: Arguments of `generate` and of its GenerationConfig.
        drafting: What is set on the generation config of the assistant, or of the model itself.
        unread: Arguments whose value is not written as a constant.
    """

    target: str | None = None
    assistant: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    drafting: dict[str, Any] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)


def read_script(text: str, name: str) -> Said:
    """What a Python script says. It is read, not run.

    Raises:
        RecipeError: It is no Python, or calls no `generate`.
    """
    if len(text) > _LONGEST:
        raise RecipeError(name, f"{len(text)} characters", f"a script of at most {_LONGEST}")
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RecipeError(name, f"neither JSON nor Python: {error}", "a GenerationConfig, or a script") from error
    reader = _Reader()
    try:
        nodes = list(ast.walk(tree))
        reader.take_names(nodes)
        reader.take_calls(nodes)
    except RecursionError as error:
        raise RecipeError(name, "nested too deep", "a script that a person wrote") from error
    if not reader.found:
        raise RecipeError(name, "no call of generate, and no GenerationConfig", "a script that generates")
    return reader.said


class _Reader:
    """Follows names to constants, models and generation configs, without running anything."""

    def __init__(self) -> None:
        self.said = Said()
        self.found = False
        self._constants: dict[str, Any] = {}
        self._models: dict[str, str | None] = {}
        self._configs: dict[str, dict[str, Any]] = {}
        self._own: dict[str, dict[str, Any]] = {}

    def take_names(self, nodes: list[ast.AST]) -> None:
        for node in nodes:
            if not isinstance(node, ast.Assign) or len(node.targets) != 1:
                continue
            place = node.targets[0]
            if isinstance(place, ast.Name):
                self._take_name(place.id, node.value)
        for node in nodes:
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                self._take_attribute(node.targets[0], node.value)
            elif isinstance(node, ast.Call):
                self._take_update(node)

    def _take_name(self, name: str, value: ast.expr) -> None:
        try:
            self._constants[name] = ast.literal_eval(value)
            return
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            pass
        for call in (each for each in ast.walk(value) if isinstance(each, ast.Call)):
            called = _called(call)
            if called == "from_pretrained" and "Tokenizer" not in ast.unparse(call.func):
                place = self._constant(call.args[0]) if call.args else None
                self._models.setdefault(name, place if isinstance(place, str) else None)
            elif called == "GenerationConfig":
                self._configs[name] = self._arguments(call)

    def _take_attribute(self, place: ast.expr, value: ast.expr) -> None:
        """`assistant.generation_config.num_assistant_tokens = 5`"""
        if not isinstance(place, ast.Attribute):
            return
        owner = place.value
        if isinstance(owner, ast.Attribute) and owner.attr == "generation_config" and isinstance(owner.value, ast.Name):
            self._set(self._own.setdefault(owner.value.id, {}), place.attr, value)
        elif isinstance(owner, ast.Name) and owner.id in self._configs:
            self._set(self._configs[owner.id], place.attr, value)

    def _set(self, settings: dict[str, Any], name: str, value: ast.expr) -> None:
        constant = self._constant(value)
        if constant is _UNKNOWN:
            self.said.unread.append(name)
        else:
            settings[name] = constant

    def _take_update(self, call: ast.Call) -> None:
        """`assistant.generation_config.update(num_assistant_tokens=5)`"""
        inner = call.func.value if isinstance(call.func, ast.Attribute) and call.func.attr == "update" else None
        if isinstance(inner, ast.Attribute) and inner.attr == "generation_config":
            owner = inner.value.id if isinstance(inner.value, ast.Name) else ""
            self._own.setdefault(owner, {}).update(self._arguments(call))

    def take_calls(self, nodes: list[ast.AST]) -> None:
        for config in self._configs.values():
            self.found = True
            self.said.settings.update(config)
        for call in nodes:
            if isinstance(call, ast.Call) and _called(call) == "GenerationConfig":
                self.found = True
                self.said.settings.update(self._arguments(call))
        for call in nodes:
            if isinstance(call, ast.Call) and _called(call) == "generate" and isinstance(call.func, ast.Attribute):
                self.found = True
                self._take_generate(call)
        self._take_own_script()

    def _take_generate(self, call: ast.Call) -> None:
        assert isinstance(call.func, ast.Attribute)
        owner = call.func.value.id if isinstance(call.func.value, ast.Name) else ""
        said = self.said
        said.target = said.target or self._models.get(owner)
        given = self._arguments(call)
        given.pop("generation_config", None)
        assistant = next((each.value for each in call.keywords if each.arg == "assistant_model"), None)
        if assistant is not None:
            name = assistant.id if isinstance(assistant, ast.Name) else ""
            given.pop("assistant_model", None)
            if not (isinstance(assistant, ast.Constant) and assistant.value is None):
                said.assistant = self._models.get(name) or ""
                said.drafting.update(self._own.get(name, {}))
        said.settings.update(given)
        if assistant is None:
            said.drafting.update(self._own.get(owner, {}))

    def _take_own_script(self) -> None:
        """Names of the script that this project writes."""
        known = self._constants
        if isinstance(known.get("SETTINGS"), dict) and "DRAFTING" in known and isinstance(known.get("TARGET"), str):
            self.said = Said(target=known["TARGET"], settings=dict(known["SETTINGS"]))
            self.said.assistant = known["ASSISTANT"] if isinstance(known.get("ASSISTANT"), str) else None
            self.said.drafting = dict(known["DRAFTING"]) if isinstance(known["DRAFTING"], dict) else {}
            for name, key in (("SEED", "seed"), ("STOP_IDS", "stop_ids"), ("LOADING", "loading"), ("DEVICE", "device")):
                if known.get(name) not in (None, [], {}):
                    self.said.settings[key] = known[name]

    def _arguments(self, call: ast.Call) -> dict[str, Any]:
        """Keyword arguments that are constants, `**name` of a constant mapping too."""
        found: dict[str, Any] = {}
        for keyword in call.keywords:
            value = self._constant(keyword.value)
            if keyword.arg is None:
                given = value.items() if isinstance(value, dict) else ()
                found.update({key: each for key, each in given if isinstance(key, str)})
            elif value is _UNKNOWN:
                if not self._is_followed(keyword.value):
                    self.said.unread.append(keyword.arg)
            else:
                found[keyword.arg] = value
        return found

    def _is_followed(self, value: ast.expr) -> bool:
        """Whether it is the name of a model or of a generation config, which are read where they are made."""
        return isinstance(value, ast.Name) and (value.id in self._models or value.id in self._configs)

    def _constant(self, value: ast.expr) -> Any:
        if isinstance(value, ast.Name):
            return self._constants.get(value.id, _UNKNOWN)
        try:
            return ast.literal_eval(value)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return _UNKNOWN


_UNKNOWN: Any = object()


def _called(call: ast.Call) -> str:
    func = call.func
    return func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""
