"""One process that imports everything once and forks hubs and workers, each with faults of its own.

Reads JSON lines from its standard input and answers with JSON lines: a child's pid, later its exit
code. Faults are real signals and real bytes; they are put around twistlm's functions in the child.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import select
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

from twistlm import config
from twistlm.system.signals import Ended
from twistlm.training import aggregator, checkpoint, rounds, worker
from twistlm.training.engines import remote
from twistlm.transport import client, hub
from twistlm.transport.protocol import UPDATE, ResultSent, transfer_tag
from twistlm.transport.session import Session, wait

torch.set_num_threads(1)
SECRET = b"a secret of sixteen bytes or more"


def die(fault: dict) -> None:
    os.kill(os.getpid(), signal.Signals[fault.get("signal", "SIGKILL")])


def faulty(faults: list[dict], log: Path) -> None:
    """Put faults around the worker's functions; each happens once, unless it is for `always`."""
    current = {"round": -1, "step": 0}
    rng = random.Random(str(log))

    def due(at: str, *kinds: str) -> dict | None:
        for fault in faults:
            now = fault["round"] in (current["round"], "any")
            if fault.get("or_later"):  # a worker may come in after its round
                now = current["round"] >= fault["round"]
            here = fault["at"] == at and now
            here = here and rng.random() < fault.get("p", 1.0)
            if here and (not kinds or fault.get("do") in kinds) and not fault.get("done"):
                fault["done"] = not fault.get("always")
                return fault
        return None

    receive, train, send, step = remote._receive, remote._train, remote._send, worker.Seat.step

    def receive_(line, place, order):
        current.update(round=order.round, step=0)
        if fault := due("receive"):
            die(fault)
        got = receive(line, place, order)
        if got is not None and due("weights"):
            return None  # as if a bit had flipped on its way down
        return got

    def step_(self, ids, lr):
        current["step"] += 1
        if current["step"] == 2 and (fault := due("train")):
            if "sleep" in fault:
                time.sleep(fault["sleep"])
            else:
                die(fault)
        step(self, ids, lr)

    def train_(place, order, sent, ids):
        with log.open("a") as file:  # what it really trained, for the exactly-once audit
            rows = ids[:, :, 0].flatten().tolist()
            file.write(json.dumps({"round": order.round, "first_ids": rows}) + "\n")
        up, loss_sum = train(place, order, sent, ids)
        floats = up.view(torch.float32)
        if due("result", "nan"):
            floats[7] = float("nan")
        if due("result", "inf moment"):
            floats[-1] = float("inf")
        if due("result", "huge"):
            floats[:500] *= 1e6
        if due("result", "garbage"):
            up.copy_(torch.randint(0, 256, up.shape, dtype=torch.uint8))
        return up, loss_sum

    def send_(line: Session, round, up, loss_sum, attempt):
        where = transfer_tag(round, UPDATE, attempt)

        def announce(round=round, up=up):
            line.tell(client.result_of(round, up, loss_sum))

        if fault := due("send", "die"):
            announce()
            line.send(up, where)
            die(fault)
        if due("send", "corrupt"):
            announce()
            bad = up.clone()
            bad[3] ^= 1
            wait(line.send(bad, where), 10)
            line.tell(ResultSent(round))
        elif due("send", "short"):
            announce(up=up[:-8].clone())
            wait(line.send(up[:-8].clone(), where), 10)
            line.tell(ResultSent(round))
        elif due("send", "cut short"):  # announced whole, sent short: gloo would accept it silently
            announce()
            wait(line.send(up[:-64].clone(), where), 10)
            line.tell(ResultSent(round))
        elif due("send", "nothing"):  # announced, said to have left, and never sent
            announce()
            line.tell(ResultSent(round))
        elif due("send", "long"):
            announce()
            wait(line.send(torch.cat([up, up]), where), 10)
        elif due("send", "wrong round"):
            announce(round=round - 1)
            send(line, round, up, loss_sum, attempt)
        elif due("send", "twice"):
            send(line, round, up, loss_sum, attempt)
            announce()
            keep.append(line.send(up.clone(), where))
            line.tell(ResultSent(round))
        else:
            send(line, round, up, loss_sum, attempt)
        if fault := due("sent"):
            die(fault)

    keep: list = []
    remote._receive, remote._train, remote._send, worker.Seat.step = receive_, train_, send_, step_


def faulty_hub(faults: list[dict]) -> None:
    """Kill the hub when it is about to do something in a round."""
    spots = {
        "post": (hub.Hub, "post"),
        "collect": (hub.Hub, "collect"),
        "aggregate": (aggregator, "aggregate_"),
        "commit": (hub.Hub, "committed"),
        "save": (checkpoint, "save_tensors"),
    }
    for fault in faults:
        where, name = spots[fault["at"]]
        original = getattr(where, name)

        def wrapped(*args, original=original, fault=fault, **more):
            fault["after"] -= 1
            if fault["after"] < 0:
                die(fault)
            return original(*args, **more)

        setattr(where, name, wrapped)


def run_worker(order: dict) -> int:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    faulty(order.get("faults", []), Path(order["log"] + ".trained"))
    remote.FIRST = order.get("first", remote.FIRST)
    options = remote.WorkerOptions(
        order["connect"],
        order.get("secret", SECRET.decode()).encode(),
        order.get("name", ""),
        order.get("widths"),
        "cpu",
        patience=order.get("patience", 60.0),
    )
    remote.work(options)
    return 0


def run_hub(order: dict) -> int:
    faulty_hub(order.get("faults", []))
    listener = socket.socket(fileno=order["listener"]) if "listener" in order else None
    listener = listener or socket.create_server((order.get("host", "127.0.0.1"), order["port"]))
    cfg = config.from_dict(order["config"])
    try:
        rounds.train(cfg, resume=order.get("resume", False), opened=(listener, SECRET))
    except Ended as end:
        print(end, flush=True)
        return end.code
    return 0


def child(order: dict) -> int:
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "netns" in order:
        with open(f"/run/netns/{order['netns']}") as handle:
            if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), 0x40000000):  # CLONE_NEWNET
                return 99
    try:
        return {"worker": run_worker, "hub": run_hub}[order["call"]](order)
    except (ValueError, OSError) as error:
        print(f"error: {error}", flush=True)
        return 2
    except SystemExit as stop:
        return stop.code
    except BaseException:
        traceback.print_exc()
        return 1


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    alive: set[int] = set()
    pending = b""
    print(json.dumps({"ready": os.getpid()}), flush=True)
    while True:
        ready, _, _ = select.select([0], [], [], 0.02)
        if ready:
            data = os.read(0, 1 << 16)
            if not data:
                break
            pending += data
        while b"\n" in pending:
            line, _, pending = pending.partition(b"\n")
            order = json.loads(line)
            pid = os.fork()
            if pid == 0:
                os._exit(child(order))
            alive.add(pid)
            print(json.dumps({"id": order["id"], "pid": pid}), flush=True)
        for pid in list(alive):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                alive.discard(pid)
                code = os.waitstatus_to_exitcode(status)
                print(json.dumps({"exit": pid, "code": code}), flush=True)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    sys.exit(main())
