"""The demo model as transformers loads it, with helpers that read and replace its recurrent states."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


class Runner:
    """transformers' own implementation of the demo model: the reference for what is right."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()

    @torch.no_grad()
    def forward(self, tokens: torch.Tensor, past=None, keep: int = 1):
        """Run `tokens` [T]; return logits [keep, vocabulary] and the cache, leaving `past` as it was."""
        past = copy.deepcopy(past)
        out = self.model(tokens[None], past_key_values=past, use_cache=True, logits_to_keep=keep)
        return out.logits[0], out.past_key_values

    @torch.no_grad()
    def greedy(self, tokens: torch.Tensor, count: int, past=None) -> tuple[list[int], list[float]]:
        """Return `count` greedy tokens after `tokens` and each one's lead over the second best logit."""
        chosen, leads = [], []
        past = copy.deepcopy(past)
        for _ in range(count):
            out = self.model(tokens[None], past_key_values=past, use_cache=True, logits_to_keep=1)
            best = out.logits[0, -1].topk(2)
            chosen.append(int(best.indices[0]))
            leads.append(float(best.values[0] - best.values[1]))
            tokens, past = best.indices[:1], out.past_key_values
        return chosen, leads


def linear_layers(past) -> list:
    """Return the cache entries of the gated delta rule layers."""
    return [layer for layer in past.layers if hasattr(layer, "recurrent_states")]


def with_states(past, change):
    """Return a copy of `past` whose recurrent state in linear layer i is `change(state, i)`."""
    past = copy.deepcopy(past)
    for i, layer in enumerate(linear_layers(past)):
        layer.recurrent_states[0] = change(layer.recurrent_states[0], i)
    return past


def text_tokens(seed: int, length: int) -> torch.Tensor:
    """Return [length] tokens of made-up lower-case words."""
    generator = torch.Generator().manual_seed(seed)
    alphabet = torch.tensor(list(b"etaoinshrdlcumwfgypbvk      \n"))
    return alphabet[torch.randint(len(alphabet), (length,), generator=generator)]
