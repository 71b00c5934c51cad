"""Hugging Face classes of a ticket: a stock model whose layers have widths of their own.

This file stands beside the weights and needs torch and transformers alone. `TicketX` is the stock
class X of transformers, built as it is and then narrowed: `config.per_layer_config` holds the
widths of every layer, `config.ticket` says which projections have them:

    layers        the module list of the transformer layers, in the base model
    projections   name -> [side, width, unit]: `unit * width` features on its `in` or `out` side
    attributes    name -> [width, unit] or [width, unit, per]: `unit * width // per`
"""

import sys

import torch
import transformers
from torch import nn

if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 14):
    raise ImportError(
        "this ticket has widths of its own in every layer and needs transformers 5.14 or newer; "
        f"{transformers.__version__} is installed: pip install -U transformers"
    )
from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig


class TicketConfig:
    """What a ticket's config has beyond the stock one."""

    _auto_class = "AutoConfig"  # so that save_pretrained takes this file along

    def validate_architecture(self):
        """Stock checks read one head count for all layers; here head_dim is explicit."""


class TicketModel:
    """What a ticket's model does beyond the stock one."""

    _keys_to_ignore_on_load_unexpected = None  # a ticket holds its parameters and nothing else

    def __init__(self, config, *args, **kwargs):
        # stock constructors ask for one width: let them build the full one, with the real config
        widths = config.to_dict()["per_layer_config"]
        config.per_layer_config = None
        try:
            super().__init__(config, *args, **kwargs)
        finally:
            config.per_layer_config = widths
        for i, layer_config in enumerate(config.per_layer_config):
            layer = self.base_model.get_submodule(f"{config.ticket['layers']}.{i}")
            _narrow_(layer, config.ticket, layer_config)


@torch.no_grad()
def _narrow_(layer, ticket, widths):
    """Give the projections and attributes of one transformer layer the sizes of its config."""
    for name, (side, width, unit) in ticket["projections"].items():
        module, size = layer.get_submodule(name), unit * getattr(widths, width)
        if isinstance(module, nn.Linear):  # [out, in]
            dim = 0 if side == "out" else 1
            sizes = ("out_features", "in_features")
        else:  # Conv1D, [in, out]
            dim = 1 if side == "out" else 0
            sizes = ("nx", "nf")
        if size > module.weight.shape[dim]:
            raise ValueError(
                f"{name}: {width} makes {size}, the full model has {module.weight.shape[dim]}"
            )
        module.weight = nn.Parameter(module.weight.narrow(dim, 0, size).clone())
        setattr(module, sizes[dim], size)
        if side == "out" and module.bias is not None:
            module.bias = nn.Parameter(module.bias.narrow(0, 0, size).clone())
    for name, (width, unit, *per) in ticket["attributes"].items():
        module, _, attribute = name.rpartition(".")
        size = unit * getattr(widths, width) // (getattr(widths, per[0]) if per else 1)
        setattr(layer.get_submodule(module), attribute, size)


def __getattr__(name):
    """`TicketX` for any X, made when asked for: this file serves every family, and pickle."""
    if name.startswith("Ticket"):
        stock = getattr(transformers, name.removeprefix("Ticket"), object)
        config = getattr(stock, "config_class", stock)
        if issubclass(config, PreTrainedConfig):
            _make_classes(config)
    if name not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]


def _make_classes(stock_config):
    """The config, base model and causal language model of one family, known to AutoModel."""
    here = sys.modules[__name__]

    def make(ours, stock, **fields):
        made = type(f"Ticket{stock.__name__}", (ours, stock), {"__module__": __name__, **fields})
        setattr(here, made.__name__, made)
        # where vLLM looks for an architecture; transformers replaces its own module on some loads
        for library in (transformers, sys.modules["transformers"]):
            setattr(library, made.__name__, made)
        return made

    config = strict(make(TicketConfig, stock_config))  # collects the validators anew
    for auto, stock_models in (
        (transformers.AutoModel, transformers.MODEL_MAPPING),
        (transformers.AutoModelForCausalLM, transformers.MODEL_FOR_CAUSAL_LM_MAPPING),
    ):
        model = make(TicketModel, stock_models[stock_config], config_class=config)
        auto.register(config, model, exist_ok=True)
