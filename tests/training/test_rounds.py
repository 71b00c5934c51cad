"""Dispatch, local steps and aggregation against plain references written here."""

import math
import sys
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import metrics
from conftest import batch_of, make_tokens, tiny

from twistlm.data import stream
from twistlm.model import generator, huggingface, masks
from twistlm.model.central import SubnetBuffer, cut_subnet
from twistlm.model.layout import cut_model, holders
from twistlm.model.subnet import gate_values, scales
from twistlm.system import files
from twistlm.training import aggregator, checkpoint, rounds, startup
from twistlm.training.aggregator import Mean, Result, Stats
from twistlm.training.assignments import Outcome, Traffic
from twistlm.training.checkpoint import Writer
from twistlm.training.engines.dataparallel import DataParallel
from twistlm.training.engines.local import Local
from twistlm.training.metrics import Metrics
from twistlm.training.run import Progress, Run
from twistlm.training.worker import learning_rate
from twistlm.transport.ranks import Cluster

STATS = Stats(1.0, 3, 96)
ORDER = (2, 0, 3, 1)  # of the four blocks of every layer
WIDTHS = {"mask_attn": [4, 1, 2], "mask_ffn": [4, 3, 1]}
WHOLE = {"k_attn": 4, "k_ffn": 4, "nested": 0.5}
RECIPES = {
    "paper": ({}, {}),
    "steps": ({"masks": "step", **WIDTHS}, {"moments": "reset"}),
    "sequences": ({"masks": "sequence", **WIDTHS, **WHOLE}, {"teacher": "start", "distil": 0.8}),
}


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> str:
    """A trained model to start from."""
    folder = tmp_path_factory.mktemp("start")
    cfg = tiny(make_tokens(folder / "tokens"), folder / "run", train={"rounds": 1})
    return str(rounds.train(cfg, quiet=True))


def setup(tokens: str, out: Path, **sections: dict) -> Run:
    cfg = tiny(tokens, out, **sections)
    cluster = Cluster(cfg.run.variant, cfg.train.n_workers, cfg.run.seat, "cpu")
    return startup.set_up(cfg, cluster, False, quiet=True)[0]


def deal(run: Run, r: int = 0):
    return generator.for_training(
        run.cut.block_map, run.cfg.train.n_workers, run.cfg.blocks, seed=run.cfg.run.seed, round=r
    )


def test_outer_rate_one_without_momentum_is_the_mean(tokens, tmp_path):
    """Bit for bit, weights and moments."""
    plain, outer = (
        rounds.train(tiny(tokens, tmp_path / name, train={"outer": name}), quiet=True)
        for name in ("none", "nesterov(1, 0)")
    )
    for name in ("model.safetensors", "moments.safetensors"):
        assert (plain / name).read_bytes() == (outer / name).read_bytes()


def test_what_nobody_held_keeps_weight_moments_and_momentum(tokens, tmp_path):
    """Worker 0 is lost: blocks that only it held stay as they are, bit for bit."""
    run = setup(tokens, tmp_path / "run", train={"outer": "nesterov(0.7, 0.6)"})
    state, blueprints = run.central, deal(run)
    before, velocity = state.buffer.normal_().clone(), state.velocity.normal_().clone()
    results = [
        Result(cut_subnet(state, held) + 1, run.cut.segments.index(held), STATS)
        for worker, held in enumerate(blueprints[1:])
    ]
    Mean(state, holders(run.cut.segments, blueprints[1:]), (0.7, 0.6)).add(*results).commit_()
    held = torch.zeros_like(state.weights, dtype=torch.bool)
    held[: state.layout.n_shared] = True
    for result in results:
        held[state.layout.n_shared :].view(-1, run.cut.segments.grain)[result.index] = True
    assert (~held).any()
    assert torch.equal(state.buffer[:, ~held], before[:, ~held])
    assert torch.equal(state.velocity[~held], velocity[~held])
    assert (state.buffer[:, held] != before[:, held]).float().mean() > 0.9


@pytest.mark.parametrize("outer", [None, (0.7, 0.6)])
def test_a_round_with_two_of_three_results_goes_two_thirds_of_the_way(tokens, tmp_path, outer):
    """So far that the sum of what came is divided by three, as with all of them."""
    table = {} if outer is None else {"outer": f"nesterov{outer}"}
    run = setup(tokens, tmp_path / "run", train=table, blocks={"k_attn": 4, "k_ffn": 4})
    state, there = run.central, deal(run)[1:]
    before = state.buffer.normal_().double()
    parts = [state.buffer + torch.randn_like(state.buffer) for _ in there]
    results = [Result(part, run.cut.segments.index(there[i])) for i, part in enumerate(parts)]
    Mean(state, holders(run.cut.segments, there), outer, 2 / 3).add(*results).commit_()
    moved = sum(part.double() - before for part in parts) / 3
    if outer is not None:  # from no momentum: lr * (1 + momentum) of the pseudo-gradient
        moved[0] *= 0.7 * (1 + 0.6)
    torch.testing.assert_close(state.buffer.double(), before + moved, rtol=0, atol=1e-6)


def test_the_schedule_follows_the_data(tokens, tmp_path):
    """Epochs with lost results last longer, and so does the schedule."""
    train = {"rounds": 0, "epochs": 3.0, "n_workers": 3, "interval": 3, "batch": 2}
    run = setup(tokens, tmp_path / "run", train=train)
    progress, calm = Progress(), []
    while progress.round < run.end(progress):
        calm.append(run.schedule_round(progress))
        leases = replace(progress.leases, next=progress.leases.next + 18)
        progress = replace(progress, round=progress.round + 1, leases=leases)
    assert calm == list(range(run.n_rounds))
    half = replace(progress, round=run.n_rounds, leases=stream.Leases(18 * (run.n_rounds // 2)))
    assert run.schedule_round(half) == run.n_rounds // 2
    little = replace(half, round=1, leases=stream.Leases(6))  # a third of the first round
    row = rounds._row(run, Outcome(STATS, Traffic(0, 0, 0), little), 1.0)
    assert row["lr"] == run.cfg.train.lr


def test_a_control_follows_the_data_as_well(tokens, tmp_path):
    """Resumed with other batches, rounds done say nothing of how far the text is trained."""
    train = {"method": "dense", "rounds": 0, "epochs": 3.0, "schedule": "cosine"}
    run = setup(tokens, tmp_path / "run", train=train)
    a_third = 18 * (run.n_rounds // 3)  # sequences
    progress = Progress(round=2, leases=stream.Leases(a_third))
    engine = DataParallel(run, progress)
    engine.round(progress)
    last = (run.n_rounds // 3 + 1) * run.cfg.train.interval - 1  # step of the round
    rate = 1e-2 * (0.1 + 0.45 * (1 + math.cos(math.pi * last / run.total_steps)))
    assert engine.trainer.optimizer.rate == pytest.approx(rate)
    assert engine.trainer.optimizer.count == last + 1


def test_nesterov_equals_torch_sgd():
    """torch's SGD(nesterov) on the pseudo-gradient is the independent reference."""
    torch.manual_seed(0)
    old = torch.randn(50, dtype=torch.float64)
    param = torch.nn.Parameter(old.clone())
    sgd = torch.optim.SGD([param], lr=0.7, momentum=0.6, nesterov=True)
    velocity = torch.zeros_like(old)
    held = torch.ones_like(old, dtype=torch.bool)
    for _ in range(4):
        mean = old + torch.randn_like(old)
        param.grad = old - mean
        sgd.step()
        old = aggregator.nesterov_(old, mean, velocity, held, 0.7, 0.6)
        torch.testing.assert_close(old, param.detach(), rtol=1e-12, atol=1e-12)


def used(run: Run, blueprint, r: int, worker: int, i: int) -> dict[str, list]:
    """The blocks of every group that each sequence of step i uses: all held, or the masks drawn."""
    cfg, batch = run.cfg, run.cfg.train.batch
    if cfg.blocks.masks == "round":
        return {name: [blocks] * batch for name, blocks in blueprint.items()}
    n_rows = batch if cfg.blocks.masks == "sequence" else 1
    turn = masks.WorkerRound(cfg.run.seed, r, worker, cfg.train.interval, n_rows)
    ones = lambda group, k: 1.0  # noqa: E731
    order = {group.name: ORDER for group in run.cut.block_map.groups}
    drawn = masks.draw(run.cut.block_map, blueprint, cfg.blocks, turn, order, "twist", ones)[i]
    kept, first = {}, 0
    for name, held in blueprint.items():
        rows = drawn[:, first : first + len(held)]
        first += len(held)
        kept[name] = [
            tuple(block for block, on in zip(held, row.tolist(), strict=True) if on)
            for row in rows.expand(batch, -1)
        ]
    return kept


def reference_rounds(run: Run, n_rounds: int) -> dict[str, torch.Tensor]:
    """TwIST by hand: stock HF model, zeroed output rows, one torch AdamW per worker, named tensors.

    Inactive blocks are held out by hooks on the output projections; the optimizer sees whole
    parameters, and what a worker did not hold is thrown away afterwards.
    """
    cfg, t = run.cfg, run.cfg.train
    base = huggingface.load(cfg.model, cfg.run.seed).double()
    weights = {n: p.detach().clone() for n, p in base.named_parameters()}
    m = {n: torch.zeros_like(w) for n, w in weights.items()}
    v = {n: torch.zeros_like(w) for n, w in weights.items()}
    partitioned = run.cut.block_map.partitioned()
    for r in range(n_rounds):
        n_before = r * t.interval
        if t.moments == "reset":
            n_before = 0
            for store in (*m.values(), *v.values()):
                store.zero_()
        blueprints = deal(run, r)
        sums = [{n: torch.zeros_like(w) for n, w in weights.items()} for _ in range(3)]
        counts = {n: torch.zeros_like(w) for n, w in weights.items()}
        for worker, blueprint in enumerate(blueprints):
            model = huggingface.load(cfg.model, cfg.run.seed).double()
            active = {}
            for name, param in model.named_parameters():
                param.data.copy_(weights[name])
                active[name] = torch.ones_like(param)
                if name in partitioned:
                    group, part = partitioned[name]
                    keep = torch.zeros(part.sections, group.n_blocks, part.chunk).double()
                    keep[:, list(blueprint[group.name])] = 1
                    shape = [1] * param.dim()
                    shape[part.dim] = -1
                    active[name] = active[name] * keep.reshape(shape)
            kept = {}  # group -> the blocks that each sequence of the step uses
            for group in run.cut.block_map.groups:
                module = model.get_submodule(group.out[0].rpartition(".")[0])

                def gate(mod, args, group=group, kept=kept):
                    part, rows = group.out_part, []
                    for blocks in kept[group.name]:
                        row = torch.zeros(part.sections, group.n_blocks, part.chunk).double()
                        row[:, list(blocks)] = math.sqrt(group.n_blocks / len(blocks))
                        rows.append(row.flatten())
                    return (args[0] * torch.stack(rows)[:, None],)

                module.register_forward_pre_hook(gate)
            decays = {True: t.weight_decay, False: 0.0}  # matrices do, vectors do not
            groups = [
                {"params": [p for p in model.parameters() if (p.dim() > 1) == matrix]}
                | {"weight_decay": decay}
                for matrix, decay in decays.items()
            ]
            adam = torch.optim.AdamW(groups, lr=t.lr, betas=t.betas, eps=t.eps)
            for name, param in model.named_parameters():
                step = torch.tensor(float(n_before))
                own = {"exp_avg": m[name].clone(), "exp_avg_sq": v[name].clone()}
                adam.state[param] = {"step": step} | own
            for i in range(t.interval):
                ids = batch_of(run.batches, t.n_workers, worker, r * t.interval + i)
                kept |= used(run, blueprint, r, worker, i)
                logits = model(input_ids=ids).logits[:, :-1]
                model.zero_grad()
                share = t.distil if t.teacher != "none" else 0.0
                mine = logits.log_softmax(-1)
                with torch.no_grad():
                    told = base(input_ids=ids).logits[:, :-1].log_softmax(-1)
                plain = -mine.gather(2, ids[:, 1:, None])[..., 0]
                kl = (told.exp() * (told - mine)).sum(-1)
                loss = ((1 - share) * plain + share * kl).mean()
                loss.backward()
                norm = torch.sqrt(
                    sum((p.grad * active[n]).square().sum() for n, p in model.named_parameters())
                )
                for param in model.parameters():
                    param.grad.mul_(min(1.0, t.clip / (float(norm) + 1e-6)))
                for group in adam.param_groups:
                    group["lr"] = learning_rate(t, r * t.interval + i, run.total_steps)
                adam.step()
            for name, param in model.named_parameters():
                counts[name] += active[name]
                own = adam.state[param]
                values = (param.detach(), own["exp_avg"], own["exp_avg_sq"])
                for total, value in zip(sums, values, strict=True):
                    total[name] += value * active[name]
        for store, total in zip((weights, m, v), sums, strict=True):
            for name in store:
                mean = total[name] / counts[name].clamp(min=1)
                store[name] = torch.where(counts[name] > 0, mean, store[name])
    return weights | {f"m/{n}": x for n, x in m.items()} | {f"v/{n}": x for n, x in v.items()}


@pytest.mark.parametrize(
    ("recipe", "seat"), [("paper", "physical"), ("steps", "physical"), ("sequences", "masked")]
)
def test_rounds_equal_a_reference_by_hand(tokens, start, tmp_path, seat, recipe):
    """Three rounds of the whole machinery against the loop above: weights and both moments."""
    exact = {"precision": "float64", "schedule": "cosine", "warmup": 2, "rounds": 3, "clip": 0.5}
    blocks, taught = RECIPES[recipe]
    run = setup(
        tokens, tmp_path / "run", run={"seat": seat}, blocks=blocks, train=exact | taught,
        model={"weights": start, "config": {}} if "teacher" in taught else {},
    )  # fmt: skip
    order = {group.name: ORDER for group in run.cut.block_map.groups}
    engine, progress = Local(run), Progress(order=order)
    for _ in range(3):
        done = engine.round(progress)
        progress = done.progress
        # every local step of every worker is in the aggregate
        assert done.stats.n_steps == run.cfg.train.n_workers * run.cfg.train.interval
    expected = reference_rounds(run, 3)
    kept = ("", "m/", "v/") if run.cfg.train.moments == "carry" else ("",)
    for row, prefix in zip(run.central.buffer, kept, strict=True):
        for name, value in run.central.layout.views(row).items():
            torch.testing.assert_close(value, expected[prefix + name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("method", ["twist", "dense", "dropout"])
def test_nobody_copies_a_model_that_one_trainer_has(tokens, tmp_path, monkeypatch, method):
    """Neither for the round nor for a checkpoint, whose writer the next round waits for."""
    open_, reached, whole = threading.Event(), threading.Event(), files.save_tensors

    def waiting(*args):
        reached.set()
        assert open_.wait(30)
        whole(*args)

    monkeypatch.setattr(checkpoint, "save_tensors", waiting)
    train, blocks = {"n_workers": 1, "method": method}, {"k_attn": 4, "k_ffn": 4}
    run = setup(tokens, tmp_path / "run", train=train, blocks=blocks)
    engine = (Local if method == "twist" else DataParallel)(run, Progress())
    done = engine.round(Progress()).progress
    (trainer,), after = run.trainers.made.values(), run.central.state.clone()
    assert trainer.buffer.data_ptr() == run.central.buffer.data_ptr()
    with Writer(tmp_path / "saved", run.cfg, run.cut.template, None, 9) as writer:
        run.central.wait_for_readers = writer.wait
        writer.save(engine.snapshot, done)
        assert reached.wait(30)
        next_ = threading.Thread(target=engine.round, args=(done,))
        next_.start()
        next_.join(0.3)
        assert next_.is_alive()
        assert torch.equal(run.central.state, after)
        open_.set()
        next_.join(30)
    assert run.central.sums is None
    assert not torch.equal(run.central.state, after)
    saved = checkpoint.verify(tmp_path / "saved/round-000001")
    cut = cut_model(checkpoint.template(saved), run.cfg.blocks, run.cut.device, run.cut.dtype)
    assert torch.equal(checkpoint.restore(saved, cut).state, after)


@pytest.mark.parametrize("over_the_wire", [False, True])
def test_a_bf16_seat_reads_the_parcel_it_was_given(tokens, tmp_path, over_the_wire):
    """The rounded copy is what the model runs on: it must follow every new part."""
    run = setup(tokens, tmp_path / "run", train={"precision": "bf16"})
    run.central.buffer.normal_()
    part = SubnetBuffer(run.cut.segments, deal(run)[0], run.central.buffer)
    expected = cut_subnet(run.central, part.blueprint)
    if over_the_wire:
        part = replace(part, source=expected.clone())
    trainer = run.trainers.get(part.layout, "physical", fresh=False)
    factors = scales(run.cut.block_map, run.cut.block_map.widths(part.blueprint), "sqrt")
    trainer.load(part, gate_values(run.cut.block_map, part.blueprint, factors), 0)
    assert torch.equal(trainer.buffer, expected)
    assert torch.equal(trainer.work, expected[0].bfloat16())


def test_bytes_are_counted(tokens, tmp_path):
    """Hand count: 3 rows (weights, m, v) of float32 for each worker's subnet, each way."""
    run = setup(tokens, tmp_path / "run")
    traffic = Local(run).round(Progress()).traffic
    d, dh, k_attn, k_ffn, chunk = 16, 4, 2, 3, 16
    attn = 3 * k_attn * dh * (d + 1) + k_attn * dh * d + d
    ffn = k_ffn * chunk * (2 * d + 1) + d
    whole = 12 * d * d + 13 * d  # the shared first layer, norms included
    n_params = (64 + 16) * d + whole + 2 * (attn + ffn + 4 * d) + 2 * d
    assert traffic.down == traffic.up == 3 * n_params * 3 * 4
    assert traffic.wire == 0


def test_learning_rate_schedule():
    cfg = tiny("x", Path("y"), train={"lr": 1.0, "warmup": 4, "schedule": "cosine"}).train
    rates = [learning_rate(cfg, step, 104) for step in range(104)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[54] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)


def test_every_round_is_told_and_logged(tmp_path, tokens, monkeypatch):
    """To the caller, and to a run of Weights & Biases that is open or asked for."""
    told, logged, ended = [], [], []
    run = SimpleNamespace(log=logged.append, finish=lambda: ended.append(True))
    wandb = SimpleNamespace(run=run, init=lambda **about: logged.append(about) or run)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    rounds.train(tiny(tokens, tmp_path / "run"), quiet=True, on_round=told.append)
    assert told == metrics(tmp_path / "run")
    assert [(row["round"], row["n_rounds"]) for row in told] == [(i, 4) for i in (1, 2, 3, 4)]
    assert [(row["round"], row["train/loss"]) for row in logged] == [
        (row["round"], row["loss"]) for row in told
    ]
    wandb.run = None
    assert Metrics(tmp_path, 0).wandb is None  # nobody asked for it
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    assert not ended  # the caller's own stays open
    with closing(Metrics(tmp_path, 0, {"train": {"lr": 1}})):
        assert (logged[-1]["dir"], logged[-1]["config"]) == (str(tmp_path), {"train": {"lr": 1}})
    assert ended
    wandb.init = lambda **about: {}["api key"]
    with pytest.raises(ValueError, match=r"^WANDB_PROJECT = 'mine' .*: KeyError: 'api key'$"):
        rounds.train(tiny(tokens, tmp_path / "keyless"), quiet=True)
    assert not metrics(tmp_path / "keyless")


def test_a_cpu_holds_the_weights_once(tmp_path, tokens):
    """The template reads the central ones, and a file is written from where they lie."""
    cfg = tiny(tokens, tmp_path / "run")
    cluster = Cluster(cfg.run.variant, cfg.train.n_workers, cfg.run.seat, "cpu")
    run, _ = startup.set_up(cfg, cluster, False, True)
    views = run.central.layout.views(run.central.weights)
    for name, param in run.cut.template.named_parameters():
        assert param.data_ptr() == views[name].data_ptr()
        assert files._own_storage(param).data_ptr() == param.data_ptr()
