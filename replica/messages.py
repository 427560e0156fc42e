"""What an engine process and its clients say to each other.

The module knows types and their encoding only. Messages are idempotent: each names its
request by (request id, attempt), outputs carry cumulative offsets, so a repeated, late or
overtaking message does no harm.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error", "moved"]
""""moved": the replica is being removed, and the sequence is to continue on another one, behind the
output that it has."""

TOO_COMPLEX = "its grammar became too complex to follow"
"""The error of a sequence whose grammar is at fault, and not the engine."""
MAX_LOGPROBS = 20
"""Most alternatives that can be returned for a token."""
MAX_TRACED_STEPS, MAX_TRACED_S = 300, 20.0
"""Longest trace. While an engine writes one, its requests stand still."""
MAX_BIASES = 300
"""Most tokens that one request may bias: they lie in a table of this width."""

Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=1024)]
"""Its length is limited, since it is repeated in each report or hashed with each block."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the tokens of one sequence are chosen and when it ends."""

    max_tokens: int
    """Upper limit of output tokens, at least 1; the context end may come first."""
    min_tokens: int = 0
    """No stop token is sampled before this many output tokens."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens with at least this probability."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the most likely token's probability."""
    repetition_penalty: float = 1.0
    """For each token in the prompt or the output: a positive logit is divided by it, a negative one
    multiplied."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that is in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token once for each time that it is in the output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit), each id once. Added after the penalties."""
    logprobs: int | None = None
    """If given, each sampled token comes with its log probability, and with those of so many of the
    most likely tokens. They are the model's own, before penalties, biases, temperature and
    filters."""
    seed: int = 0
    """64-bit unsigned. Seed, `choice` and position determine every draw."""
    choice: int = 0
    """Index of this sequence among the choices of its request."""
    stop_token_ids: tuple[int, ...] = ()
    """End the sequence, as the model's own end-of-sequence ids do."""
    ignore_eos: bool = False
    """The model's own end-of-sequence ids do not end the sequence."""
    prompt_logprobs: int | None = None
    """Like `logprobs`, for each token of the prompt but the first. The prompt then takes nothing
    from the prefix cache."""
    allowed_token_ids: tuple[int, ...] | None = None
    """If given, only these tokens may be sampled."""
    grammar: str = ""
    """If given, the output follows this grammar (in llguidance's format)."""
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that the output never contains."""

    @property
    def greedy(self) -> bool:
        """The most likely token is taken; nothing is drawn."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def filtered(self) -> bool:
        """Only the most likely tokens are kept."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def shaped(self) -> bool:
        """Logits are changed by what the sequence holds already, or by given amounts."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
            or bool(self.logit_bias)
        )


class Submit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="submit"):
    """Start a sequence. A second submit of the same (request id, attempt) is ignored."""

    request_id: Name
    attempt: int = 0
    prompt_ids: tuple[int, ...]
    prior_output_ids: tuple[int, ...] = ()
    """Output of an earlier attempt: the sequence continues behind it, at the same positions."""
    sampling: Sampling
    cache_salt: Name = ""
    """Domain of the prefix cache: sequences with different salts never share a block."""
    band: int = 0
    """Priority class; a higher number is preempted first."""


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """End a sequence now. It may arrive before its submit, which is then refused."""

    request_id: Name
    attempt: int = 0


class Backlog(msgspec.Struct, frozen=True, kw_only=True, tag="backlog"):
    """Whether the router holds work that this engine has no credit for (idle accounting)."""

    waiting: bool


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """Finish what is running, then exit; with `drain=False`, abort it first."""

    drain: bool = True


class Trace(msgspec.Struct, frozen=True, kw_only=True, tag="trace"):
    """Keep what the next steps do, and write it to files (`replica.timeline.engine_trace`)."""

    folder: str
    """Of this machine."""
    steps: Annotated[int, msgspec.Meta(ge=1, le=MAX_TRACED_STEPS)]
    seconds: Annotated[float, msgspec.Meta(ge=0, le=MAX_TRACED_S)]
    """Whatever steps there were by then."""


Command: TypeAlias = Submit | Abort | Backlog | Stop | Trace


class Malformed(msgspec.Struct, frozen=True):
    """A command that could not be read, with as much of its request as is known. It is
    never sent."""

    request_id: Name
    attempt: int = 0
    reason: str = ""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The log probability of one token, and of the most likely ones in its place."""

    logprob: float
    top_ids: tuple[int, ...]
    """Most likely first."""
    top_logprobs: tuple[float, ...]


class Output(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one step added to one sequence. Without cycles, so nothing for the collector: a step
    makes hundreds."""

    request_id: str
    attempt: int
    offset: int
    """Output tokens that came before `token_ids`, prior output included."""
    token_ids: tuple[int, ...]
    """Sampled ids in order; a stop token is the last of them."""
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when the sequence first ran."""
    error: str = ""
    """Why, when `finish_reason` is "error"."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per id of `token_ids` where they were asked for, else none."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """With the first token, where they were asked for: one per prompt token but the first."""
    gpu_s: float = 0.0
    """The sequence's share of the device's time so far, in seconds."""
    queued_s: float = 0.0
    """From when the engine was asked to the first step that computed for the sequence, in
    seconds; the same in each of its outputs."""


class OutputBuffer:
    """The outputs of one sequence put together. What comes twice is dropped."""

    def __init__(self, request_id: str, attempt: int, start: int) -> None:
        self.start = start
        """Output tokens that came before."""
        self._newest = Output(request_id, attempt, start, ())
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def end(self) -> int:
        """Output tokens so far, those before `start` included."""
        return self.start + len(self._token_ids)

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._newest.finish_reason

    def add(self, output: Output) -> bool:
        """Append what is new in it; whether that is anything. Raises ValueError if tokens before
        it are missing."""
        seen = self.end - output.offset
        if seen < 0:
            raise ValueError(f"{-seen} tokens of request {output.request_id} are missing")
        new_ids = output.token_ids[seen:]
        if not new_ids and output.finish_reason is None:
            return False
        if not seen:
            self._prompt_logprobs = self._prompt_logprobs or output.prompt_logprobs
        self._token_ids += new_ids
        self._logprobs += output.logprobs[seen:]
        self._newest = output
        return True

    def since(self, offset: int) -> Output:
        """All from that token on, as one output. offset: `start` at least."""
        skipped = offset - self.start
        return msgspec.structs.replace(
            self._newest,
            offset=offset,
            token_ids=tuple(self._token_ids[skipped:]),
            logprobs=tuple(self._logprobs[skipped:]),
            prompt_logprobs=() if skipped else self._prompt_logprobs,
        )


class DeviceTime(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of a device's seconds; the fields add up to wall time (`replica.idle`)."""

    requests: float = 0.0
    """Busy, for sequences."""
    surplus: float = 0.0
    """Busy, for nobody: padding, and rows whose sequence had ended."""
    bubble: float = 0.0
    """Idle although this engine had work."""
    starved: float = 0.0
    """Idle while work waited at the router only."""
    spare: float = 0.0
    """Idle while no work waited anywhere."""

    @property
    def busy(self) -> float:
        return self.requests + self.surplus

    @property
    def total(self) -> float:
        return self.busy + self.bubble + self.starved + self.spare

    def since(self, before: DeviceTime) -> DeviceTime:
        """What has passed from then to now."""
        parts = ((name, getattr(before, name)) for name in self.__struct_fields__)
        return DeviceTime(**{name: getattr(self, name) - part for name, part in parts})


class StepLimits(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the seconds that a device was busy went on, by the cost model
    (`replica.scheduling.step_budget`): all zero as long as nothing is known of it."""

    weights: float = 0.0
    """Reading them: the same for any number of rows, so more rows cost none of it."""
    tokens: float = 0.0
    """Products: the device's arithmetic."""
    keys: float = 0.0
    """Reading the KV pool."""
    attention: float = 0.0
    """Its arithmetic."""
    launches: float = 0.0
    """The host's time to launch what the device computes sooner."""


class Stats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state of an engine; counters are cumulative since its start."""

    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    """Prompt tokens computed, recomputation after a preemption included."""
    cached_tokens: int = 0
    output_tokens: int = 0
    surplus_rows: int = 0
    """Rows computed although their sequence had ended."""
    preemptions: int = 0
    finished: dict[str, int] = {}
    """Sequences ended, by finish reason."""
    time: DeviceTime = DeviceTime()
    limits: StepLimits = StepLimits()
    host_s: float = 0.0
    """CPU time of the step loop (schedule, fill, launch, update), without waiting for results."""
    graph_replays: int = 0
    """Replays of graphs. The parts of a step (forward, sampling, log probabilities) count apart,
    here and in the next two."""
    eager_parts: int = 0
    """Parts of steps that ran without a graph."""
    padding_rows: int = 0
    """Padding rows in those replays."""
    kv_slots: int = 0
    """Tokens that fit into the blocks of running rows. A shared block counts once for each row."""
    kv_tokens: int = 0
    """Tokens in those blocks. The difference to `kv_slots` is internal fragmentation."""
    compiled: int = 0
    """Kernels compiled or loaded since the engine was ready. Each delays a step: there should be
    none."""


TraceOutcome: TypeAlias = Literal["written", "busy", "failed"]
""""busy": another one was under way, and this one never began."""


class Traced(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a trace."""

    folder: str
    outcome: TraceOutcome


class StepReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="report"):
    """One message per step, whatever the batch size; also sent once a second when idle."""

    outputs: list[Output]
    stats: Stats
    traced: tuple[Traced, ...] = ()
    """Traces that have ended."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """First message of an engine process that came up."""

    model_type: str
    vocab_size: int
    """Rows of the output projection: ids at or above it do not exist."""
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    """Longest prompt plus output, in tokens."""
    max_rows: int
    block_size: int
    num_blocks: int
    grammars: bool = True
    """Whether it supports grammars (`Sampling.grammar`)."""
    started_ns: int = 0
    """Start of its time accounting, on this machine's clock (`time.perf_counter_ns`)."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """Last message of an engine process that cannot go on."""

    reason: str


Event: TypeAlias = StepReport | Ready | Failed

_encoder = msgspec.msgpack.Encoder()
_command_decoder = msgspec.msgpack.Decoder(Command)
_malformed_decoder = msgspec.msgpack.Decoder(Malformed)
_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""What msgspec raises for bytes that it cannot decode: for wrong types, for wrong text, for deep
nesting."""
_event_decoder = msgspec.msgpack.Decoder(Event)


def encode(message: Command | Event) -> bytes:
    """The wire form (msgpack)."""
    return _encoder.encode(message)


def decode_command(data: bytes) -> Command:
    """Raises msgspec.ValidationError on anything that is not a command."""
    return _command_decoder.decode(data)


def read_command(data: bytes) -> Command | Malformed | None:
    """Of anything that may come: None where it does not name a request."""
    try:
        return decode_command(data)
    except _UNREADABLE as error:
        reason = f"the request cannot be read: {error}"
    try:
        named = _malformed_decoder.decode(data)
    except _UNREADABLE:
        return None
    return msgspec.structs.replace(named, reason=reason)


def decode_event(data: bytes) -> Event:
    """Raises msgspec.ValidationError on anything that is not an event."""
    return _event_decoder.decode(data)
