"""Grammars in the worker: which tokens may come next in each sequence that has one.

The step loop never compiles: `prepare` hands a new sequence to a thread, and `take_ready` gives it back when its
matchers are there. Masks are computed in a second thread while the model runs, because what may come next depends
only on the tokens that are known already.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from enginehouse.engine.messages import AddSequence, SequenceId
from enginehouse.engine.sequence import SampledToken, SampleError, Sequence
from enginehouse.engine.step import SampleRow
from enginehouse.engine.structured_output import Grammar
from enginehouse.engine.structured_output_compile import GrammarError, compile_grammar, large_stack_thread
from enginehouse.runtime.tokenizer import META_FILE, TOKENIZER_FILE, TokenizerMeta

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)

MAX_PROTOTYPES: Final = 16
"""Compiled grammars that are kept. Each may grow to `max_lexer_states`."""

SLOW_MASK_S: Final = 0.02
MAX_SLOW_MASKS: Final = 16
"""A sequence fails with this many masks of more than `SLOW_MASK_S` of processor time: every step would wait for it.
Real grammars take a hundredth of that."""

_FAULTS = (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)

Banned = npt.NDArray[np.bool_]
"""True for the tokens that must not be chosen [vocab]."""


class PreparedSequence(NamedTuple):
    """A sequence whose grammar was compiled, or could not be; `aborted` are those nobody wants any more."""

    message: AddSequence
    error: str | None
    aborted: list[SequenceId]


class _Vocabulary(NamedTuple):
    tokenizer: LLTokenizer
    is_text: Banned
    """False for special tokens and for padding [vocab]."""


@dataclass(slots=True)
class _Follower:
    """Where one sequence is in its grammar: after `num_consumed` tokens of its output."""

    matcher: LLMatcher
    grammar: Grammar
    num_consumed: int
    num_slow_masks: int = 0


class GrammarMatchers:
    """Owns the matchers of all sequences with a grammar, from `prepare` to `forget`; two threads, started with the
    first of them; and the last `MAX_PROTOTYPES` compiled grammars. The methods are for the step loop's thread.

    A sequence is where its output tokens say, nothing else: one that was preempted keeps its matcher, one that
    comes from a dead worker has its tokens fed to a new one.
    """

    def __init__(self, model_path: str, vocab_size: int, wake: Callable[[], None]) -> None:
        self._model_path = Path(model_path)
        self._vocab_size = vocab_size
        self._wake = wake
        self._compiler: ThreadPoolExecutor | None = None
        self._masker: ThreadPoolExecutor | None = None
        self._vocabulary: _Vocabulary | None = None
        self._prototypes: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._followers: dict[SequenceId, _Follower] = {}
        self._compiling: dict[SequenceId, bool] = {}
        """Sequences not ready yet, and whether they are still wanted."""
        self._done: deque[tuple[AddSequence, list[_Follower] | str]] = deque()
        self._masks: Future[list[Banned | SampleError | None]] | None = None

    # --- coming and going ------------------------------------------------------------------------------------

    def prepare(self, message: AddSequence) -> None:
        """Get matchers for a sequence and its siblings; `wake` is called when `take_ready` has something new."""
        if self._compiler is None:
            self._compiler = large_stack_thread("grammar-compile")
            self._masker = large_stack_thread("grammar-masks")
        self._compiling.update(dict.fromkeys(_family(message), True))
        prototype = self._prototypes.get(_grammar(message))
        if prototype is not None and not message.output_tokens:
            # Known grammars do not queue behind one that takes long.
            self._done.append((message, _copies(prototype, message)))
        else:
            self._compiler.submit(self._compile, message)

    def take_ready(self) -> list[PreparedSequence]:
        """What has become ready since the last call, in the order it became so."""
        ready: list[PreparedSequence] = []
        while self._done:
            message, result = self._done.popleft()
            family = _family(message)
            aborted = [sequence_id for sequence_id in family if not self._compiling.pop(sequence_id)]
            if isinstance(result, str):
                ready.append(PreparedSequence(message, result, aborted))
                continue
            self._followers.update(zip(family, result, strict=True))
            ready.append(PreparedSequence(message, None, aborted))
        return ready

    def forget(self, sequence_ids: Iterable[SequenceId]) -> None:
        """These sequences ended or were aborted; unknown ids are ignored."""
        for sequence_id in sequence_ids:
            self._followers.pop(sequence_id, None)
            if sequence_id in self._compiling:
                self._compiling[sequence_id] = False

    # --- every step ------------------------------------------------------------------------------------------

    def start(self, rows: list[SampleRow]) -> None:
        """Begin to compute the masks for `rows`; `masks` must be called before anything else."""
        if self._masker is not None and any(row.sequence.sequence_id in self._followers for row in rows):
            self._masks = self._masker.submit(self._compute, [row.sequence for row in rows])

    def masks(self) -> list[Banned | SampleError | None] | None:
        """Per row what must not be chosen, why it cannot go on, or None for free text; None when all are free."""
        if self._masks is None:
            return None
        masks, self._masks = self._masks.result(), None
        return masks

    def advance(
        self, rows: list[SampleRow], samples: list[SampledToken | SampleError]
    ) -> list[SampledToken | SampleError]:
        """Follow what was chosen: `samples`, with `ends` where the grammar is complete."""
        assert self._masker is not None, "masks were computed for these rows"
        sequences = [row.sequence for row in rows]
        return self._masker.submit(self._follow, sequences, samples).result()

    # --- in the compiling thread -----------------------------------------------------------------------------

    def _compile(self, message: AddSequence) -> None:
        result: list[_Follower] | str
        try:
            result = self._new_followers(message)
        except GrammarError as error:
            result = f"The grammar cannot be followed: {error}"
        except Exception as error:  # the outermost frame of this thread: told, and one request fails
            logger.exception("compiling a grammar failed")
            result = f"Compiling the grammar failed: {error}"
        self._done.append((message, result))
        self._wake()

    def _new_followers(self, message: AddSequence) -> list[_Follower]:
        grammar = _grammar(message)
        if self._vocabulary is None:
            self._vocabulary = self._load_vocabulary()
        prototype = self._prototypes.get(grammar)
        if prototype is None:
            prototype = compile_grammar(grammar, self._vocabulary.tokenizer)
            self._prototypes[grammar] = prototype
        self._prototypes.move_to_end(grammar)
        while len(self._prototypes) > MAX_PROTOTYPES:
            self._prototypes.popitem(last=False)
        followers = _copies(prototype, message)
        for follower in followers:
            if message.output_tokens and not follower.matcher.consume_tokens(message.output_tokens):
                raise GrammarError("the tokens emitted so far do not follow it")
        return followers

    def _load_vocabulary(self) -> _Vocabulary:
        """Takes about half a second and holds the interpreter meanwhile, once in a worker's life."""
        from llguidance import LLTokenizer

        document = (self._model_path / TOKENIZER_FILE).read_text(encoding="utf-8")
        meta = msgspec.json.decode((self._model_path / META_FILE).read_bytes(), type=TokenizerMeta)
        # Models without an end token end where the grammar does; some id has to stand for it.
        eos_token = next(iter(meta.eos_token_ids), meta.bos_token_id or 0)
        tokenizer = LLTokenizer(document, n_vocab=self._vocab_size, eos_token=eos_token)
        is_text = np.array([not tokenizer.is_special_token(token) for token in range(self._vocab_size)])
        is_text[[eos_token, *meta.eos_token_ids]] = False
        return _Vocabulary(tokenizer, is_text)

    # --- in the masking thread -------------------------------------------------------------------------------

    def _compute(self, sequences: list[Sequence]) -> list[Banned | SampleError | None]:
        masks: list[Banned | SampleError | None] = []
        for sequence in sequences:
            follower = self._followers.get(sequence.sequence_id)
            if follower is None:
                masks.append(None)
                continue
            try:
                masks.append(self._mask(follower, sequence))
            except _FAULTS as error:
                masks.append(_mistake(error))
        return masks

    def _mask(self, follower: _Follower, sequence: Sequence) -> Banned | SampleError:
        assert self._vocabulary is not None
        matcher, params = follower.matcher, sequence.params
        assert follower.num_consumed == len(sequence.output_tokens)
        since_s = time.thread_time()
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            return self._failure(follower)
        follower.num_slow_masks += time.thread_time() - since_s > SLOW_MASK_S
        if follower.num_slow_masks >= MAX_SLOW_MASKS:
            return SampleError("the grammar takes too long to follow; simplify it, nested counters above all")
        eos_token = self._vocabulary.tokenizer.eos_token
        may_end = bool(bits[eos_token // 8] >> (eos_token % 8) & 1)
        allowed: Banned = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        named = {token: bool(allowed[token]) for token in follower.grammar.special_tokens}
        allowed &= self._vocabulary.is_text
        for token, is_allowed in named.items():
            allowed[token] = is_allowed
        if may_end and sequence.can_stop:
            allowed[list(params.end_token_ids)] = True
        if may_end and not allowed.any():
            allowed[list(params.eos_token_ids)] = True
        return ~allowed

    def _follow(
        self, sequences: list[Sequence], samples: list[SampledToken | SampleError]
    ) -> list[SampledToken | SampleError]:
        results: list[SampledToken | SampleError] = []
        for sequence, sample in zip(sequences, samples, strict=True):
            follower = self._followers.get(sequence.sequence_id)
            if follower is None or isinstance(sample, SampleError):
                results.append(sample)
                continue
            try:
                results.append(self._consume(follower, sequence, sample))
            except _FAULTS as error:
                results.append(_mistake(error))
        return results

    def _consume(
        self, follower: _Follower, sequence: Sequence, sample: SampledToken
    ) -> SampledToken | SampleError:
        matcher, params, token = follower.matcher, sequence.params, sample.token
        if sequence.can_stop and token in params.end_token_ids:
            return sample
        if (
            token in params.eos_token_ids
        ):  # before `min_tokens` or in spite of `ignore_eos`: nothing else is left
            return sample._replace(ends=True)
        follower.num_consumed += 1
        if not matcher.consume_token(token) or matcher.is_error():
            return self._failure(follower)
        return sample._replace(ends=True) if matcher.is_stopped() else sample

    def _failure(self, follower: _Follower) -> SampleError:
        # Copies share their prototype's lexer, and one that met its limit stays there.
        assert self._compiler is not None
        self._compiler.submit(self._prototypes.pop, follower.grammar, None)
        return _failure_of(follower.matcher)


def _family(message: AddSequence) -> list[SequenceId]:
    return [message.sequence_id, *message.sibling_ids]


def _grammar(message: AddSequence) -> Grammar:
    assert message.params.grammar is not None, "only sequences with a grammar come here"
    return message.params.grammar


def _copies(prototype: LLMatcher, message: AddSequence) -> list[_Follower]:
    grammar, num_consumed = _grammar(message), len(message.output_tokens)
    return [_Follower(prototype.deep_copy(), grammar, num_consumed) for _ in _family(message)]


def _mistake(error: Exception) -> SampleError:
    # A mistake of ours that one row brought to light must not reach the others.
    logger.exception("following a grammar failed")
    return SampleError(f"following the grammar failed: {error}")


def _failure_of(matcher: LLMatcher) -> SampleError:
    reason = matcher.get_error().split("\n", 1)[0]
    return SampleError(f"the grammar became too costly to follow, or cannot be completed: {reason}")
