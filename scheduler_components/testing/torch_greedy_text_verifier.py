"""Compare greedy text of a paged cache with transformers' ``generate`` on the same weights.

Greedy text depends only on the weights and the prompt, so each token must equal that of ``generate``, regardless of
cache, scheduler and device. Different orders of summation may swap two tokens with nearly equal logits. The verifier
accepts such a token only if its logit differs by less than the measured noise of ``generate`` itself, and continues
from that token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from scheduler_components._internal.extras import naming_extras
from scheduler_components.testing.check_trace import ConformanceError

with naming_extras:
    import torch

__all__ = ["GreedyTextVerifier", "GeneratedText", "NearTie"]

_NOISE_TOKENS = 24  # Length of the text for the measurement of the noise.
_NOISE_FACTOR = 8.0  # Other batches and pages have other orders of summation than the two measured ones.


class GenerativeModel(Protocol):
    """The members of transformers' ``PreTrainedModel`` with ``GenerationMixin`` that the verifier uses."""

    config: Any
    device: Any

    def eval(self) -> object:
        """Switch to evaluation mode."""
        ...

    def generate(self, inputs: torch.Tensor, **settings: Any) -> Any:
        """Continue ``inputs``, of shape ``[1, tokens]``."""
        ...

    def __call__(self, input_ids: torch.Tensor, **settings: Any) -> Any:
        """Compute logits."""
        ...


class GeneratedText(msgspec.Struct, frozen=True):
    """A greedy continuation.

    Attributes:
        token_ids: without the prompt.
        gaps: for each token, how far its logit is above the second highest.
    """

    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]


class NearTie(msgspec.Struct, frozen=True):
    """A token that differs from ``generate``'s by less than the noise.

    Attributes:
        position: in the output, from 0.
        expected, found: tokens.
        gap: logit of ``expected`` minus that of ``found``, from ``generate``.
    """

    position: int
    expected: int
    found: int
    gap: float


@dataclass(slots=True, kw_only=True)
class GreedyTextVerifier:
    """Compares greedy text with that of transformers' ``generate``, and caches the generated text.

    Create it with ``over``. It is not thread-safe.

    Attributes:
        model: transformers' model in evaluation mode; its generation settings are ignored.
        noise: logits with a smaller difference count as equal.
    """

    model: GenerativeModel
    noise: float
    _texts: dict[tuple[int, ...], GeneratedText] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def over(cls, model: GenerativeModel) -> GreedyTextVerifier:
        """Measure the noise of a model: compare the logits of one pass over a text with those of one pass per token."""
        model.eval()
        verifier = cls(model=model, noise=0.0)
        draw = torch.Generator().manual_seed(0)
        prompt = torch.randint(model.config.get_text_config().vocab_size, (_NOISE_TOKENS,), generator=draw).tolist()
        tokens, logits = verifier._generate(prompt, _NOISE_TOKENS)
        difference = verifier.logits((*prompt, *tokens))[len(prompt) - 1 : -1] - logits
        verifier.noise = _NOISE_FACTOR * float(difference.abs().max())
        return verifier

    def text(self, prompt: Sequence[int], max_new_tokens: int) -> GeneratedText:
        """Continue ``prompt`` by ``max_new_tokens`` tokens; no stop token ends it."""
        known = self._texts.get(tuple(prompt))
        if known is None or len(known.token_ids) < max_new_tokens:
            tokens, logits = self._generate(prompt, max_new_tokens)
            best = logits.topk(2).values
            known = GeneratedText(tokens, tuple((best[:, 0] - best[:, 1]).tolist()))
            self._texts[tuple(prompt)] = known
        return GeneratedText(known.token_ids[:max_new_tokens], known.gaps[:max_new_tokens])

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return the logits after each token, from one pass without a cache: ``[tokens, vocabulary]``, float32."""
        with torch.inference_mode():
            given = torch.tensor([list(token_ids)], device=self.model.device)
            return self.model(given, use_cache=False).logits[0].float()  # type: ignore[no-any-return]

    def expect(
        self, prompt: Sequence[int], found: Sequence[int], *, num_tokens: int, stop_token_ids: Iterable[int] = ()
    ) -> list[NearTie]:
        """Compare a whole answer: ``num_tokens`` tokens, or fewer when the last is the first stop token.

        Return its near ties.

        Raises:
            ConformanceError: it has other tokens, or a wrong length.
        """
        ties = self.expect_prefix(prompt, found)
        stops = frozenset(stop_token_ids)
        end = next((at + 1 for at, token in enumerate(found) if token in stops), num_tokens)
        if len(found) != min(end, num_tokens):
            raise _differs(prompt, f"{min(end, num_tokens)} tokens", f"{len(found)} tokens")
        return ties

    def expect_prefix(self, prompt: Sequence[int], found: Sequence[int]) -> list[NearTie]:
        """Compare an answer that may have ended anywhere.

        Return its near ties.

        Raises:
            ConformanceError: a token differs and the logits are further apart than the noise.
        """
        ties: list[NearTie] = []
        done = 0
        while done < len(found):
            context = (*prompt, *found[:done])
            expected = self.text(context, len(found) - done).token_ids
            wrong = next((at for at, token in enumerate(expected) if token != found[done + at]), None)
            if wrong is None:
                break
            ties.append(self._tie(context, expected[: wrong + 1], found[done + wrong], position=done + wrong))
            done += wrong + 1
        return ties

    def expect_answers(self, token_ids: Sequence[int], answers: Iterable[range]) -> list[NearTie]:
        """Compare all answers of a conversation in one pass; positions of ties refer to ``token_ids``.

        Each token is compared with the highest logit after the served text before it. This costs one prefill, while
        ``expect`` costs one pass per token.

        Args:
            token_ids: prompts and answers.
            answers: the positions of each answer.

        Raises:
            ConformanceError: a token is not the most probable one, and the logits are further apart than the noise.
        """
        logits = self.logits(token_ids)
        ties: list[NearTie] = []
        for position in (place for answer in answers for place in answer):
            found, row = token_ids[position], logits[position - 1]
            if (expected := int(row.argmax())) != found:
                ties.append(self._near_tie(row, token_ids[:position], expected, found, position=position))
        return ties

    def _tie(self, context: Sequence[int], expected: Sequence[int], found: int, *, position: int) -> NearTie:
        """Return the near tie between the found token and the last expected one."""
        _, logits = self._generate(context, len(expected))
        return self._near_tie(logits[-1], context, expected[-1], found, position=position)

    def _near_tie(
        self, row: torch.Tensor, context: Sequence[int], expected: int, found: int, *, position: int
    ) -> NearTie:
        """Return the near tie of two tokens, or raise an error that shows ``context``."""
        if not 0 <= found < len(row):
            raise _differs(context, f"{expected} at {position}", f"{found}, which is not in the vocabulary")
        gap = float(row[expected] - row[found])
        if gap > self.noise:
            difference = f"{found}, whose logit is {gap:.3g} lower; the noise is {self.noise:.3g}"
            raise _differs(context, f"{expected} at {position}", difference)
        return NearTie(position, expected, found, gap)

    def _generate(self, prompt: Sequence[int], num_tokens: int) -> tuple[tuple[int, ...], torch.Tensor]:
        """Return greedy tokens and their logits: ``[num_tokens, vocabulary]``, float32."""
        given = torch.tensor([list(prompt)], device=self.model.device)
        made = self.model.generate(
            given,
            attention_mask=torch.ones_like(given),
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            min_new_tokens=None,
            max_new_tokens=num_tokens,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_logits=True,
        )
        return tuple(made.sequences[0, len(prompt) :].tolist()), torch.cat(made.logits).float()


def _differs(prompt: Sequence[int], expected: str, found: str) -> ConformanceError:
    steps = (f"continue {len(prompt)} tokens that end with {list(prompt[-8:])}",)
    return ConformanceError("greedy text equals that of transformers' generate", steps, expected, found)
