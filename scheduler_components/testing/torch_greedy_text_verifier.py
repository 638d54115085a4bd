"""What transformers' ``generate`` makes of the same weights: the judge of text that came out of a paged cache.

Greedy text follows from the weights and the prompt alone, so whatever a cache, a scheduler and a device did on the way,
each token must be the one that ``generate`` gives. Nothing is skipped where two ways of adding up the same numbers may
differ: there ``generate`` must find the two tokens closer together than its own arithmetic differs from itself, by the
logits, and from that token on it continues the text that is judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import torch

from scheduler_components.testing.check_trace import ConformanceError

__all__ = ["GreedyTextVerifier", "GeneratedText", "NearTie"]

_NOISE_TOKENS = 24  # of the text by which the noise is measured
_NOISE_FACTOR = 8.0  # other batches and pages add up in other orders than the two that were measured


class GenerativeModel(Protocol):
    """What the judge uses of transformers' ``PreTrainedModel`` with ``GenerationMixin``."""

    config: Any
    device: Any

    def eval(self) -> object:
        """Switch off what only training does."""
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
    """A token that differs from the one that ``generate`` gives, where the arithmetic cannot tell the two apart.

    Attributes:
        position: of the output, from 0.
        expected, found: tokens.
        gap: logit of ``expected`` less that of ``found``, as ``generate`` has them.
    """

    position: int
    expected: int
    found: int
    gap: float


@dataclass(slots=True, kw_only=True)
class GreedyTextVerifier:
    """Compares greedy text with that of transformers' ``generate``; remembers what it has generated.

    Made by ``over``. Not thread-safe.

    Attributes:
        model: transformers', in evaluation mode; its generation settings are not read.
        noise: logits that are no further apart than this are equal to its arithmetic.
    """

    model: GenerativeModel
    noise: float
    _texts: dict[tuple[int, ...], GeneratedText] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def over(cls, model: GenerativeModel) -> GreedyTextVerifier:
        """Measure the noise of a model: the same logits, from one pass over a text and from one pass per token."""
        model.eval()
        judge = cls(model=model, noise=0.0)
        draw = torch.Generator().manual_seed(0)
        prompt = torch.randint(model.config.get_text_config().vocab_size, (_NOISE_TOKENS,), generator=draw).tolist()
        tokens, logits = judge._generate(prompt, _NOISE_TOKENS)
        difference = judge.logits((*prompt, *tokens))[len(prompt) - 1 : -1] - logits
        judge.noise = _NOISE_FACTOR * float(difference.abs().max())
        return judge

    def text(self, prompt: Sequence[int], max_new_tokens: int) -> GeneratedText:
        """Continue ``prompt`` by ``max_new_tokens`` tokens; no token ends it."""
        known = self._texts.get(tuple(prompt))
        if known is None or len(known.token_ids) < max_new_tokens:
            tokens, logits = self._generate(prompt, max_new_tokens)
            best = logits.topk(2).values
            known = GeneratedText(tokens, tuple((best[:, 0] - best[:, 1]).tolist()))
            self._texts[tuple(prompt)] = known
        return GeneratedText(known.token_ids[:max_new_tokens], known.gaps[:max_new_tokens])

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits after each token of a text, from one pass without a cache: ``[tokens, vocabulary]``, float32."""
        with torch.inference_mode():
            given = torch.tensor([list(token_ids)], device=self.model.device)
            return self.model(given, use_cache=False).logits[0].float()  # type: ignore[no-any-return]

    def expect(
        self, prompt: Sequence[int], found: Sequence[int], *, num_tokens: int, stop_token_ids: Iterable[int] = ()
    ) -> list[NearTie]:
        """Compare a whole answer: ``num_tokens`` tokens, or fewer when the last is the first stop token.

        Returns the near ties in it.

        Raises:
            ConformanceError: it has other tokens, ends early or goes on too long.
        """
        ties = self.expect_prefix(prompt, found)
        stops = frozenset(stop_token_ids)
        end = next((at + 1 for at, token in enumerate(found) if token in stops), num_tokens)
        if len(found) != min(end, num_tokens):
            raise _differs(prompt, f"{min(end, num_tokens)} tokens", f"{len(found)} tokens")
        return ties

    def expect_prefix(self, prompt: Sequence[int], found: Sequence[int]) -> list[NearTie]:
        """Compare an answer that may have ended anywhere.

        Returns the near ties in it.

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
        """Compare all answers in a conversation, by one pass over it; a position of a tie is one in ``token_ids``.

        Each token is judged by the text before it, as served: where all are the ones with the highest logits, they are
        what ``generate`` gives. It costs what a prefill does, where ``expect`` costs a pass per token.

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
        """Say how close the token that was found is to the last of the expected ones."""
        _, logits = self._generate(context, len(expected))
        return self._near_tie(logits[-1], context, expected[-1], found, position=position)

    def _near_tie(
        self, row: torch.Tensor, context: Sequence[int], expected: int, found: int, *, position: int
    ) -> NearTie:
        """Say how close the logits of two tokens are; ``context`` is what the error shows."""
        if not 0 <= found < len(row):
            raise _differs(context, f"{expected} at {position}", f"{found}, which the model does not have")
        gap = float(row[expected] - row[found])
        if gap > self.noise:
            told = f"{found}, whose logit is {gap:.3g} lower, where the noise is {self.noise:.3g}"
            raise _differs(context, f"{expected} at {position}", told)
        return NearTie(position, expected, found, gap)

    def _generate(self, prompt: Sequence[int], num_tokens: int) -> tuple[tuple[int, ...], torch.Tensor]:
        """Greedy tokens, and the logits that they were taken from: ``[num_tokens, vocabulary]``, float32."""
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
    return ConformanceError("greedy text is that of transformers' generate", steps, expected, found)
