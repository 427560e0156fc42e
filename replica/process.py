"""The engine's own process: it owns the device, and dies with the process that spawned it.

The step loop shares its interpreter lock with no event loop: a busy second thread would delay
each waking by milliseconds. Commands and reports pass over one local socket.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import msgspec
import torch
import zmq

from replica.config import EngineConfig
from replica.device.graph_pool import GraphPool, Graphs, NoGraphs
from replica.device.graph_sizes import default_sizes
from replica.device.stream import Device, HostDevice
from replica.engine import Channel, Engine
from replica.logs import LogFile, log_to, log_to_terminal
from replica.messages import Command, Failed, Malformed, Ready, StepReport, encode, read_command
from replica.model.cpu.pack import choose, pack
from replica.model.decoder import Decoder
from replica.model.loading import UnsupportedModel, load_decoder, load_spec, load_tokenizer
from replica.model.runner import DecoderRunner
from replica.model.spec import ModelSpec
from replica.sampling.grammars import Grammars
from replica.scheduling.batch import MAX_SCORES
from replica.scheduling.cost_fit import CostFit
from replica.warm_up import Replay, WarmUp

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1


class SocketChannel:
    """The engine's end of the socket."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(address)

    def receive(self, timeout_s: float) -> Iterable[Command | Malformed]:
        if self._socket.poll(int(timeout_s * 1000)):
            return list(self._pending())
        return ()

    def send(self, report: StepReport | Ready | Failed) -> None:
        self._socket.send(encode(report))

    def close(self) -> None:
        """Deliver what was sent, waiting for the other side at most 2 s."""
        self._socket.close(linger=2000)

    def _pending(self) -> Iterator[Command | Malformed]:
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            command = read_command(data)
            if command is not None:
                yield command
            else:
                logger.warning("A command of %d bytes cannot be read", len(data))


def context_length(config: EngineConfig, spec: ModelSpec) -> int:
    """The longest sequence: what was asked for, else what the model and the KV pool allow.

    Raises ValueError if more was asked for than the model was trained for.
    """
    if config.max_model_len is None:
        return min(spec.max_position, config.num_blocks * config.block_size)
    if config.max_model_len > spec.max_position:
        raise ValueError(
            f"engine.max_model_len is {config.max_model_len}, but the model's context ends at "
            f"{spec.max_position}"
        )
    return config.max_model_len


def open_device(config: EngineConfig) -> Device:
    """Raises ValueError if this machine has no such device."""
    if config.device == "cpu":
        return HostDevice()
    if not torch.cuda.is_available():
        raise ValueError("engine.device is 'cuda', but torch finds no CUDA device here")
    from replica.device.cuda import CudaDevice

    return CudaDevice()


def prepare(config: EngineConfig, decoder: Decoder, device: Device) -> tuple[EngineConfig, Graphs]:
    """The configuration with a KV pool that fits, and what will hold the graphs."""
    if config.device == "cpu":
        pack(decoder, choose(decoder.embedding.dtype, config.cache_dir))
        return config, NoGraphs()
    from replica.device.cuda import CudaDevice, CudaRecorder
    from replica.memory import with_kv_pool
    from replica.model.gpu.tuning import keep_compiled, load_products, tune

    assert isinstance(device, CudaDevice)
    keep_compiled(config.cache_dir)
    tune(decoder, config.max_rows, device, config.cache_dir)
    load_products(decoder, config.max_step_tokens, config.max_rows + MAX_SCORES, device)
    wanted = config.graph_sizes or default_sizes(config.max_rows)
    sizes = tuple(sorted({*wanted, config.max_rows})) if config.cuda_graphs else ()
    config = with_kv_pool(config, decoder, device, sizes)
    return config, GraphPool(CudaRecorder(device), sizes, device.free_bytes)


def load_grammars(config: EngineConfig, spec: ModelSpec) -> Grammars | None:
    """None where the model has no tokenizer, or one that grammars cannot be followed with."""
    try:
        tokenizer = load_tokenizer(config.model, config.revision).backend_tokenizer
        return Grammars(tokenizer.to_str(), spec.vocab_size, spec.eos_token_ids)
    except (UnsupportedModel, ValueError) as error:
        logger.warning("No structured output: %s", error)
        return None


def available_cores() -> int:
    """Cores that this process may run on, which may be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_threads() -> int:
    """All cores but one, where there are several: the threads of a forward pass meet at barriers,
    and all of them would wait for one whose core an HTTP front end has taken."""
    return max(available_cores() - 1, 1)


def build(config: EngineConfig, channel: Channel) -> tuple[Engine, Ready]:
    """Load, warm up, and describe an engine. Raises ValueError where it cannot work."""
    torch.set_num_threads(config.threads or default_threads())
    spec = load_spec(config.model, config.revision)
    if config.kv_tokens is not None or config.device == "cpu":
        context_length(config, spec)  # what cannot work fails before the weights are loaded
    device = open_device(config)
    dtype = getattr(torch, spec.dtype if config.dtype == "auto" else config.dtype)
    with ThreadPoolExecutor(1, "tokenizer") as aside:
        grammars = aside.submit(load_grammars, config, spec)
        decoder = load_decoder(config.model, config.revision, dtype, device.memory)
    engine = assemble(config, decoder, device, channel, grammars.result())
    config = engine.config
    ready = Ready(
        model_type=spec.model_type,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        max_model_len=engine.max_model_len,
        max_rows=config.max_rows,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        grammars=grammars.result() is not None,
        started_ns=engine.idle.started_ns,
    )
    return engine, ready


def assemble(
    config: EngineConfig,
    decoder: Decoder,
    device: Device,
    channel: Channel,
    grammars: Grammars | None = None,
) -> Engine:
    """An engine around a decoder, warmed up, with all of its graphs. The KV pool takes what
    memory there is, if the configuration does not say how large it is."""
    config, graphs = prepare(config, decoder, device)
    spec = decoder.spec
    max_model_len = context_length(config, spec)
    if config.max_model_len is None and max_model_len < spec.max_position:
        logger.warning(
            "Requests are limited to %d tokens, which is what the KV pool holds: the model's "
            "context has %d. Raise engine.kv_tokens, or set engine.max_model_len",
            max_model_len,
            spec.max_position,
        )
    runner = DecoderRunner(decoder, config.num_blocks, config.block_size)

    fit = warm_up(config, runner, max_model_len, device)
    engine = Engine(
        config,
        runner,
        channel,
        max_model_len=max_model_len,
        eos_token_ids=spec.eos_token_ids,
        fit=fit,
        device=device,
        graphs=graphs,
        grammars=grammars,
    )
    engine.pipeline.capture()
    device.give_back()
    collect_rarely()
    engine.start_over()
    return engine


def warm_up(
    config: EngineConfig, runner: DecoderRunner, max_model_len: int, device: Device
) -> CostFit:
    """With an engine of its own, whose memory is free again afterwards: the KV pool was planned
    for one engine."""
    channel = Replay()
    engine = Engine(
        replace(config, overlap=False), runner, channel, max_model_len=max_model_len, device=device
    )
    fit = WarmUp(engine, channel).run()
    engine.pipeline.close()
    del engine
    device.give_back()
    return fit


def collect_rarely() -> None:
    """Keep Python's collector out of steps. What lives now lives on, and a step leaves hundreds of
    objects but no cycles: a collection would walk through all of them for nothing."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def die_with_parent() -> None:
    """End this process when its parent ends, however that comes about.

    The kernel's signal works even while this interpreter hangs; the closed pipe works where the
    parent's thread that forked outlives the parent's interest.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def main() -> None:
    """Arguments: socket address, EngineConfig as JSON, LogFile as JSON or null."""
    address, settings, log = sys.argv[1:]
    die_with_parent()
    channel = SocketChannel(address)
    try:
        if (file := msgspec.json.decode(log, type=LogFile | None)) is not None:
            log_to(file)
        else:
            log_to_terminal()
        config = msgspec.json.decode(settings, type=EngineConfig)
        # A thread that ends takes its OpenMP threads along: see `HostDevice.copy`.
        with ThreadPoolExecutor(1, "loader") as loader:
            engine, ready = loader.submit(build, config, channel).result()
        channel.send(ready)
        with torch.inference_mode():
            engine.run()
        if report := engine.pipeline.fit_report():
            logger.info("%s", report)
    except Exception as error:
        logger.critical("The engine ends", exc_info=error)
        channel.send(Failed(reason=f"{error}" or type(error).__name__))
        channel.close()
        raise
    channel.close()
