"""Cost models against values computed by hand, vendors' figures and times measured another way."""

from __future__ import annotations

import json
import re
import timeit
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments import roofline_check
from experiments.measure_solve import MONET_COSTS
from remat import _profile_worker
from remat.cost import COST_MODELS, CostWarning, Gpu, Noise, apply_cost, costs_and_noise, gpu_names, load_gpu, timing
from remat.cost import profile as profile_module
from remat.cost.gpu import EFFICIENCY, GPU_FOLDER, matrix_dtype, operation_class
from remat.cost.records import TIME_FIELDS, read_fields, read_samples, write_record
from remat.cost.roofline import operation_ns
from remat.cost.timing import Timing
from remat.errors import InvalidInput, UnknownName
from remat.files import unsealed
from remat.frontends.monet import read_costs
from remat.graph import Graph, Operation, Value, Work
from remat.implementation import Implementation

PLAIN = Gpu("plain", 10**9, 1e9, 1e-6, {"float32": 1e12, "float16": 4e12}, dict.fromkeys(EFFICIENCY, 1.0))


LESS = Gpu("less", 10**9, 1e9, 0.0, {"float32": 1e12}, {
    "convolution": 0.5, "matmul": 0.25, "memory": 0.8, "normalization": 0.4, "pooling": 0.2, "pooling_backward": 0.1,
})  # fmt: skip
COMPUTE, MEMORY, HALF = Work(10**9, 0), Work(0, 10**6), Work(2 * 10**9, 1000, "float16")
COMPUTE, MEMORY = Work(10**9, 0), Work(0, 10**6)


def one_op(kind: str, work: Work | None) -> Graph:
    return Graph.from_nodes("one", [[]], [8], [0], kinds=[kind], works=[work], backward=["Grad" in kind])


@pytest.mark.filterwarnings("ignore::remat.cost.CostWarning")
def test_roofline_by_hand() -> None:
    for gpu, kind, work, expected_ns in (
        (PLAIN, "Conv2D", Work(2 * 10**9, 1000), 2_000_000 + 1000),  # 2e9 / 1e12 s, then the launch
        (PLAIN, "Conv2D", Work(1000, 10**6), 1_000_000 + 1000),  # 1e6 / 1e9 s
        (PLAIN, "Conv2D", HALF, 500_000 + 1000),  # matrix units take matrix work
        (PLAIN, "Add", HALF, 2_000_000 + 1000),  # and nothing else
        (PLAIN, "Conv2D", replace(HALF, dtype="bfloat16"), 2_000_000 + 1000),  # no such units: the float32 rate
        (PLAIN, "Strange", Work(None, 5000), 5000 + 1000),
        (PLAIN, "Reshape", Work(10**9, 10**9, is_free=True), 0),
        (PLAIN, "Empty", Work(0, 0), 1000),
        # Efficiencies scale what bounds an operation.
        (LESS, "aten.convolution_backward", COMPUTE, 2_000_000),
        (LESS, "aten.addmm", COMPUTE, 4_000_000),
        (LESS, "aten.relu", COMPUTE, 1_000_000),
        (LESS, "aten.relu", MEMORY, 1_250_000),
        (LESS, "BatchNormalization", MEMORY, 2_500_000),
        (LESS, "MaxPooling2D", MEMORY, 5_000_000),
        (LESS, "MaxPooling2DGrad", MEMORY, 10_000_000),
    ):
        costed = apply_cost(one_op(kind, work), "roofline", gpu)
        assert (costed.operations[0].cost, costed.cost_unit) == (expected_ns, "ns"), (kind, work)


def test_classes() -> None:
    expected = {
        "convolution": ("aten.convolution", "Conv2DBackpropFilter"),
        "matmul": ("aten.mm", "BatchMatMulV2", "DenseGrad", "aten._scaled_dot_product_flash_attention_for_cpu"),
        "normalization": ("aten.native_layer_norm", "FusedBatchNormGradV3", "GroupNormalization"),
        "pooling": ("AvgPoolGrad",),
        "other": ("aten.hypot", "prims.convert_element_type", "RandomStandardNormal", "aten.upsample_bilinear2d"),
    }
    assert {name: {operation_class(kind) for kind in kinds} for name, kinds in expected.items()} == {
        name: {name} for name in expected
    }


def test_float32_becomes_tf32_where_the_frameworks_do_it() -> None:
    a100, v100 = load_gpu("a100_40gb"), load_gpu("v100")
    kinds = ("aten.convolution", "Conv2D", "MatMul", "aten.mm")
    assert [matrix_dtype(kind, "float32", a100) for kind in kinds] == ["tf32", "tf32", "tf32", "float32"]
    assert matrix_dtype("aten.convolution", "float32", v100) == "float32"
    assert matrix_dtype("aten.mul", "float64", a100) == "float64"


def test_kinds_without_a_rule_are_charged_the_bytes_they_move_and_named_in_one_warning() -> None:
    works = [
        Work(20, 7, published_flops=10),  # a layer graph: the artifact's count
        Work(20, 7),
        Work(None, 7),  # no rule
        Work(99, 7, is_free=True),
        None,  # nothing known: what it reads and writes
    ]
    graph = Graph.from_nodes(
        "g", [[], [0], [1], [2], [0, 3]], [1, 2, 3, 4, 5], [0] * 5, kinds=list("abcde"), works=works
    )
    for model, unit in (("flops", "flop"), ("roofline", "ns")):
        with pytest.warns(CostWarning, match=": c, e$") as caught:
            costed = apply_cost(graph, model, PLAIN)
        assert (len(caught), costed.cost_unit) == (1, unit)
        assert model != "flops" or costed.costs.tolist() == [10, 20, 7, 0, 1 + 4 + 5]


def test_unknown_names_a_missing_device_and_costs_that_are_there_are_refused() -> None:
    with pytest.raises(UnknownName, match="v100"):
        load_gpu("v10")
    for model, gpu, device, error, says in (
        ("rooflin", PLAIN, "cpu", UnknownName, "roofline"), ("profile", PLAIN, "cudo", UnknownName, "cuda"),
        ("roofline", None, "cpu", InvalidInput, "needs a device"),
    ):  # fmt: skip
        with pytest.raises(error, match=says):
            apply_cost(one_op("a", COMPUTE), model, gpu, device=device)
    for model in COST_MODELS:
        with pytest.raises(InvalidInput, match="use the costs it came with"):
            apply_cost(Graph.from_nodes("given", [[]], [1], [5]), model, PLAIN)


def test_a_device_that_cannot_be_is_refused() -> None:
    for change in (
        {"peak_flops": {"float16": 1.0}}, {"peak_flops": {"float32": 0.0}}, {"bandwidth_bytes_per_s": -1.0},
        {"memory_bytes": 0}, {"launch_overhead_s": -1.0}, {"efficiency": {"memory": 0.5}},
        {"efficiency": EFFICIENCY | {"memory": 1.5}},
    ):  # fmt: skip
        with pytest.raises(InvalidInput, match="gpu 'plain'"):
            replace(PLAIN, **change)


def test_device_files() -> None:
    """Every figure has a source, and no wrong power of ten: between a small CPU and a rack."""
    source = re.compile(r"datasheet|whitepaper|measured|estimate|by construction|common figure")
    for name in gpu_names():
        gpu, content = load_gpu(name), json.loads((GPU_FOLDER / f"{name}.json").read_text())
        assert gpu.name == name
        assert 1e10 < gpu.peak_flops["float32"] < 1e15
        assert 5e9 < gpu.bandwidth_bytes_per_s < 1e13
        assert 4e9 < gpu.memory_bytes < 1e12
        assert 1e-7 < gpu.launch_overhead_s < 1e-4
        assert 1 < gpu.peak_flops["float32"] / gpu.bandwidth_bytes_per_s < 200
        figures = [f"{key}.{inner}" for key in ("peak_flops", "efficiency") for inner in content.get(key, {})]
        for figure in ("memory_bytes", "bandwidth_bytes_per_s", "launch_overhead_s", *figures):
            assert source.search(content["sources"].get(figure, "")), f"{name}.json: no source for {figure}"


def signature(op: str, *args: object, **kwargs: object) -> str:
    return json.dumps({"fw": "torch", "op": op, "args": args, "kwargs": kwargs}, sort_keys=True, separators=(",", ":"))


def tensor(*shape: int, dtype: str = "float32") -> dict:
    strides = [1]
    for n in reversed(shape[1:]):
        strides.insert(0, strides[0] * n)
    return {"t": list(shape), "s": strides[: len(shape)], "d": dtype}


def graph_of(signatures: dict[str, str], bytes_moved: Sequence[int] = ()) -> Graph:
    """A graph of operations of these kinds, with these signatures."""
    n, moved = len(signatures), bytes_moved or [1000] * len(signatures)
    works = [Work(1, size, signature=text) for size, text in zip(moved, signatures.values(), strict=True)]
    return Graph.from_nodes("g", [[]] * n, [4] * n, [0] * n, kinds=list(signatures), works=works)


def named(**bytes_moved: int) -> Graph:
    return graph_of({name: signature(name) for name in bytes_moved}, [*bytes_moved.values()])


def profiled(graph: Graph, folder: Path) -> Graph:
    return apply_cost(graph, "profile", None, cache_folder=folder, device="cpu")


def with_noise(graph: Graph, folder: Path) -> tuple[Graph, Noise]:
    return costs_and_noise(graph, "profile", None, cache_folder=folder, device="cpu")


def test_profile_runs_kernels_on_as_many_threads_as_this_process_does() -> None:
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    try:
        for n in (1, 3):
            torch.set_num_threads(n)
            assert profile_module.machine(["torch"])[0].endswith(f", {n} threads")
    finally:
        torch.set_num_threads(threads)


def test_profile_measures_once_and_names_what_it_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(profile_module, "_threads", lambda _: 1)  # two threads of a busy machine wait for each other
    square, indices = tensor(256, 256), tensor(64, 10, dtype="int64")
    cpu = {"device": {"x": "cpu"}, "dtype": {"x": "torch.int64"}}
    signatures = {
        "aten.mm": signature("aten.mm.default", square, square),
        "aten.again": signature("aten.mm.default", square, square),
        "aten.embedding": signature("aten.embedding.default", tensor(100, 8), indices),
        "aten.arange": signature("aten.arange.start_step", 0, 9, 1, **cpu),
        "aten.nonsense": signature("aten.nonsense.default", tensor(4)),
        "opaque": "",
    }
    with pytest.warns(CostWarning, match=r"not measured(?!.*aten\.mm).*aten\.nonsense \(.*opaque \(it cannot be rebui"):
        mm, again, embedding, *_ = profiled(graph_of(signatures), tmp_path).costs.tolist()
    assert mm == again
    assert min(mm, embedding) > 0
    files = list(tmp_path.glob("*.json"))
    records = [unsealed(json.loads(path.read_text()), path) for path in files]
    # the shortest time is hardly disturbed by other processes: compare it with one taken here
    a, threads = torch.rand(256, 256), torch.get_num_threads()
    torch.set_num_threads(1)
    here_ns = 1e9 * min(timeit.repeat(lambda: torch.mm(a, a), number=1, repeat=50))
    torch.set_num_threads(threads)
    best_ns = [best for r in records if "aten.mm" in r["signature"] for _, best in r["samples"]]
    assert not best_ns or here_ns / 8 < min(best_ns) < here_ns * 8  # none, if there was no quiet moment
    release = torch.__version__.split("+")[0]
    assert [{name: v.split("+")[0] for name, v in r["versions"].items()} for r in records] == [{"torch": release}] * 3

    for path, finished in zip(files, records, strict=True):  # as on an idle machine
        write_record(path, {"ns": 5000, "best_ns": 5000} | finished)
    asked = list[str]()
    monkeypatch.setattr(profile_module, "_measure", lambda missing, *_: asked.extend(missing.values()) or {})
    with pytest.warns(CostWarning):
        profiled(graph_of(signatures), tmp_path)
    assert asked == [signatures["aten.nonsense"]]  # only the one that could not be measured is tried again


def test_profile_of_keras_layers_and_tensorflow_operations(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    layer = {"fw": "keras", "class": "Conv2D", "config": {"filters": 8, "kernel_size": 3}, "inputs": [[2, 9, 9, 3]]}
    image, kernel = {"t": [2, 16, 16, 3], "d": "float32"}, {"t": [3, 3, 3, 8], "d": "float32"}
    attributes = {
        "strides": [1, 1, 1, 1], "padding": "SAME", "data_format": "NHWC", "dilations": [1, 1, 1, 1],
        "use_cudnn_on_gpu": True, "explicit_paddings": [],
    }  # fmt: skip
    documents = {
        "Conv2D": layer | {"backward": False},
        "Conv2DGrad": layer | {"backward": True},
        "op": {"fw": "tensorflow", "op": "Conv2D", "attrs": attributes, "inputs": [image, kernel], "outputs": 1},
        "Loss": {"fw": "keras", "class": "__loss__", "config": {}, "inputs": [[4, 10]], "backward": False},
    }
    graph = graph_of({kind: json.dumps(document) for kind, document in documents.items()})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="not measured", category=CostWarning)
        warnings.filterwarnings("ignore", message="the machine was too busy", category=CostWarning)
        costed = apply_cost(graph, "profile", None, cache_folder=tmp_path)
    assert len(list(tmp_path.glob("*.json"))) == 4
    assert all(1000 <= cost < 10**9 for cost in costed.costs.tolist())


def measuring_processes(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[str], dict[str, Any] | str | None], code: int = 0
) -> list[int]:
    """How many operations each process is given; all end with `code`, and do not measure but `answer`.

    An answer is the record of an operation, or why it fails; None is a crash.
    """
    jobs: list[int] = []

    def child(_: object, path: Path, _frameworks: list[str]) -> tuple[list[list[str]], int]:
        job, printed = json.loads(path.read_text()), list[list[str]]()
        jobs.append(len(job["signatures"]))
        for key, text in job["signatures"].items():
            printed.append(["start", key])
            found = answer(json.loads(text)["op"])
            if found is None:
                return printed, -11
            if isinstance(found, str):
                printed.append(["failed", key, found])
            else:
                write_record(Path(job["folder"], f"{key}.json"), found)
        return printed, code

    monkeypatch.setattr(profile_module._Child, "measure", child)
    return jobs


def test_profile_survives_a_crash_of_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"ns": 42, "best_ns": 40}
    jobs = measuring_processes(monkeypatch, lambda op: None if "crash" in op else found)
    with pytest.warns(CostWarning, match=r"crash \(its process ended with code -11\)$"):
        costs = profiled(named(fine=1000, crash=1000, later=1000), tmp_path).costs.tolist()
    assert (costs[0], costs[2], jobs) == (42, 42, [3, 1])
    measuring_processes(monkeypatch, lambda _: found, code=-11)  # a crash when all is measured costs nothing
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert profiled(named(one=1000, two=1000), tmp_path).costs.tolist() == [42, 42]


class _Clock:
    """A runner that takes the times it is given, one a call, and does what is asked for meanwhile."""

    def __init__(self, times: dict[str, list[Any]], meanwhile: Callable[[str], None] = lambda _: None):
        self.times, self.meanwhile = times, meanwhile
        self.asked: list[str] = []

    def prepare(self, descriptions: Iterable[dict]) -> None:
        """Nothing to compile."""

    def time(self, description: dict, device: str) -> Timing:
        self.asked.append(description["op"])
        found = self.times[description["op"]].pop(0)
        self.meanwhile(description["op"])
        if found == INTERRUPT:
            raise KeyboardInterrupt
        return found if isinstance(found, Timing) else Timing(found, found - 1)


INTERRUPT = "Ctrl-C"


class Worker:
    """The worker, whose runner takes the times that it is given; records are in `folder`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.folder, self.patch = folder, monkeypatch.setattr
        self.patch(_profile_worker, "_set_threads", lambda *_: None)
        self.patch(_profile_worker.time, "sleep", lambda _: None)

    def run(self, clock: _Clock, passes: int = 3) -> None:
        """Measure the operations that `clock` knows."""
        self.patch(_profile_worker, "_runner", lambda _framework: clock)
        job = {
            "quantity": "time", "fields": TIME_FIELDS, "passes": passes, "suffix": ".json", "device": "cpu",
            "folder": str(self.folder), "frameworks": ["torch"], "threads": 2, "provenance": {},
            "signatures": {key: signature(key) for key in clock.times},
        }  # fmt: skip
        (self.folder / "job").write_text(json.dumps(job))
        _profile_worker.main(str(self.folder / "job"))

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def times(self, key: str) -> tuple[int, ...] | None:
        return read_fields(self.path(key), TIME_FIELDS)


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Worker:
    return Worker(tmp_path, monkeypatch)


def test_times_are_taken_in_passes_that_go_on_where_they_were(worker: Worker) -> None:
    clock = _Clock({"a": [70, 50, 60], "b": [9, INTERRUPT, 7, 8], "slow": [2e9]})
    with pytest.raises(KeyboardInterrupt):  # in the second pass, at b
        worker.run(clock)
    assert clock.asked == ["a", "b", "slow", "a", "b"]
    assert [worker.times(key) for key in ("a", "b")] == [None, None]
    assert worker.times("slow") == (2_000_000_000, 1_999_999_999)  # for a slow one once is enough
    assert read_samples(worker.path("a")) == [(70, 69), (50, 49)]
    clock.asked.clear()
    for _ in range(2):  # the second time nothing is left to do
        worker.run(clock)
        assert clock.asked == ["b", "a", "b"]
        assert [worker.times(key) for key in ("a", "b")] == [(60, 49), (8, 6)]  # the passes' median, and the shortest


def test_a_slower_process_leaves_what_another_finished(worker: Worker) -> None:
    clock = _Clock({"a": [7, 7, 7]}, lambda key: write_record(worker.path(key), {"ns": 42, "best_ns": 40}))
    worker.run(clock)
    assert (worker.times("a"), clock.asked) == ((42, 40), ["a"])

    def a_sample_elsewhere(key: str) -> None:
        write_record(worker.path(key), {"samples": [*read_samples(worker.path(key)), (9, 8)]})

    clock = _Clock({"b": [7, 7, 7]}, a_sample_elsewhere)
    worker.run(clock)
    assert (worker.times("b"), clock.asked) == ((8, 6), ["b", "b"])  # after the first pass there were samples of two


@pytest.mark.filterwarnings("ignore:.*measuring again")
@pytest.mark.parametrize(
    "held", [None, {"ns": "5", "best_ns": 4}, {"ns": -5, "best_ns": 4}, {"ns": 5}, {"samples": 3},
             {"samples": [[3, -1], [2, "1"], [1], 3]}],
)  # fmt: skip
def test_what_is_damaged_is_measured_again(held: dict | None, worker: Worker) -> None:
    if held is None:
        worker.path("a").write_text("{")
    else:
        write_record(worker.path("a"), held)
    assert worker.times("a") is None
    worker.run(_Clock({"a": [7, 8, 9]}))
    assert worker.times("a") == (8, 6)


BUSY = Timing(4e7, 4e7 - 1, disturbed=True)  # the processor was taken away
POLLUTED = {"ns": 104_000_000, "best_ns": 1_000_000}


@pytest.mark.parametrize(
    ("before", "passes", "times", "after"),
    [
        # Other processes make most passes 104 times as long; two undisturbed ones of three are asked for.
        ({}, 3, [5_200_000, 51_000, 5_100_000, 5_300_000, 50_000], (50_500, 49_999)),
        ({}, 3, [BUSY, BUSY, BUSY, BUSY, 50_000, 50_000], (50_000, 49_999)),  # the disturbed ones agree with each other
        (POLLUTED, 3, [1_100_000, 1_300_000], (1_200_000, 1_000_000)),
        (POLLUTED | {"samples": [[104_000_000, 1_000_000]]}, 3, [1_100_000, 1_300_000], (1_200_000, 1_000_000)),
        ({"ns": 1_400_000, "best_ns": 1_000_000}, 3, [], (1_400_000, 1_000_000)),  # of before, and steady
        ({"samples": [(7, 6), (8, 5), (9, 8), (10, 9)]}, 2, [9], (9, 5)),  # of more passes than are asked for
    ],
)
def test_what_is_disturbed_is_measured_again_until_it_is_steady(
    before: dict, passes: int, times: list, after: tuple, worker: Worker
) -> None:
    rests: list[float] = []
    worker.patch(_profile_worker.time, "sleep", rests.append)
    if before:
        write_record(worker.path("a"), before)
    clock = _Clock({"a": [*times]})
    worker.run(clock, passes)
    assert worker.times("a") == after
    assert len(clock.asked) == len(times)
    assert rests == max(0, len(times) - passes) * [_profile_worker.REST_S]


def test_what_is_never_steady_is_left_for_a_later_process(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock({"a": [2.0 ** (i % 9) * 1e6 for i in range(40)]})
    for n_asked in (9, 16):
        worker.run(clock)
        assert (worker.times("a"), len(read_samples(worker.path("a")))) == (None, 9)
        assert len(clock.asked) == n_asked
    worker.run(_Clock({"a": 9 * [5e5]}))  # the machine is idle again
    assert worker.times("a") == (500_000, 499_999)
    clock = _Clock({"b": [2.0**i * 1e6 for i in range(40)]})
    monkeypatch.setattr(_profile_worker.time, "monotonic", lambda: 7.0 * len(clock.asked))
    worker.run(clock)
    assert len(clock.asked) == 3 + 4  # as long again as measuring: the last one begins after 21 of 21 seconds


def test_samples_in_which_the_processor_was_taken_away_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample of 40 ms with three turns of other processes; one of a second with three is hardly longer for it."""
    taken, times = 0, iter([4e4, 4e4, 4e7, 5e4, 6e4, 4e7, 4e7, 4e4, 4e4, *5 * [4e7], 2e9, 3e9])

    def wall_ns(run: Callable[[], object], n: int) -> float:
        nonlocal taken
        ns = next(times)
        taken += 3 if ns > 1e6 else 0
        return ns

    monkeypatch.setattr(timing, "wall_ns", wall_ns)
    monkeypatch.setattr(timing, "_preemptions", lambda: taken)
    monkeypatch.setattr(timing, "_empty_caches", lambda: None)
    measured = [timing.measure_as_in_step(lambda: None, lambda: None) for _ in range(3)]
    assert measured == [(5.5e4, 5e4, False), (4e7, 4e7, True), (3e9, 2e9, False)]
    left = Timing(130e3, 100e3).less(Timing(60e3, 40e3, disturbed=True))
    assert (left.median_ns, left.noise, left.disturbed) == (70e3, pytest.approx(1.5), True)


def test_unsteady_times_are_the_rooflines_scaled_to_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    graph, cpu = named(fast=10**6, slow=10**7, noisy=10**8, odd=10**7), load_gpu("cpu")
    modelled = [operation_ns(op.kind, op.work, cpu) for op in graph.operations]
    answers: dict[str, dict[str, Any] | str] = {
        name: {"ns": 3 * ns, "best_ns": round(3 * ns / 1.25)}
        for name, ns in zip(("fast", "slow"), modelled, strict=False)
    }
    answers |= {"noisy": {"samples": [[104_000_000, 1_000_000]]}, "odd": "LookupError: what is that?"}
    measuring_processes(monkeypatch, answers.__getitem__)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        costed, noise = with_noise(graph, tmp_path)
    assert costed.costs.tolist() == pytest.approx([3 * ns for ns in modelled], rel=1e-6)
    assert noise == Noise(pytest.approx(0.25, abs=1e-3), 2, 2)
    assert str(noise) == "2 operations measured to 25%, 2 by the roofline"
    assert {one.filename for one in caught} == {__file__}
    unsteady, unmeasured = sorted((str(one.message) for one in caught), key=lambda text: "odd" in text)
    assert re.match(r"the machine was too busy to time 1 operation steadily, 83% of the cost: charged.*$", unsteady)
    assert re.match(r".*odd \(LookupError: what is that\?\)$", unmeasured)


def test_an_unsteady_operation_that_hardly_counts_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    asked: list[str] = []

    def answer(name: str) -> dict[str, Any]:
        asked.append(name)
        return {"ns": 10**7, "best_ns": 10**7} if name == "large" else {"samples": [[10**8, 10**6]]}

    measuring_processes(monkeypatch, answer)
    for _ in range(2):
        with warnings.catch_warnings(action="error"):
            _, noise = with_noise(named(large=10**8, small=10**6), tmp_path)
        assert str(noise) == "1 operation measured to 0%, 1 by the roofline"
    assert sorted(asked) == ["large", "small"]
    with pytest.warns(CostWarning, match="too busy to time 1 operation steadily"):
        costed, noise = with_noise(alone := named(small=10**6), tmp_path)
    assert costed.costs.tolist() == apply_cost(alone, "roofline", load_gpu("cpu")).costs.tolist()
    assert str(noise) == "1 by the roofline"


def test_an_implementation_that_was_not_timed_is_no_bargain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that no steady time showed to be ten times slower won by their roofline, which is the default's."""
    pytest.importorskip("torch")
    ns = {"a": 50_000, "a fast": 40_000, "a slow": 500_000, "b": 90_000, "d fast": 7_000}  # no other time is steady

    def work(name: str) -> Work:
        return Work(1, 10**6, signature=signature(name))

    def operation(k: int, name: str, *others: str) -> Operation:
        ways = tuple(Implementation(f"{name} {w}", (), (k,), work=work(f"{name} {w}")) for w in others)
        return Operation(name, name, (), (k,), work=work(name), implementations=ways)

    given = ("a", "fast", "slow"), ("b", "odd"), ("c",), ("d", "fast")
    operations = tuple(operation(k, *names) for k, names in enumerate(given))
    graph = Graph("g", operations, tuple(Value(op.name, 4) for op in operations))
    times = {signature(name): (t, t) for name, t in ns.items()}
    monkeypatch.setattr(profile_module, "_measured", lambda *_: ("cpu", times, {}))
    with pytest.warns(CostWarning, match="too busy to time 3 operations steadily"):
        costed, _ = with_noise(graph, tmp_path)
    a, b, c, d = ([op.cost, *(each.cost for each in op.implementations)] for op in costed.operations)
    assert a == [50_000, 40_000, 500_000]
    assert b == [90_000, 10 * 90_000]  # the slowest that was timed takes ten times its default
    assert d == [c[0], 7_000]  # a default keeps the roofline's


def test_times_on_a_cpu_are_those_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The input was just written, and the weights were not."""
    pytest.importorskip("torch")
    from remat.torch.measuring import timing

    touched: list[float] = []

    def measured(run: Callable[[], object], touch: Callable[[], list]) -> Timing:
        run()
        touched.extend(float(x) for x in touch())
        return Timing(5.0, 4.0)

    monkeypatch.setattr(timing, "measure_as_in_step", measured)
    args = [tensor(2), tensor(50, 60), tensor(60, 2)]  # of numbers between 0.1 and 1
    for called in (signature("aten.addmm.default", *args), signature("aten.mm.default", *args[1:])):
        assert timing.time(json.loads(called), "cpu") == Timing(5.0, 4.0)
        assert 300 < touched.pop() < 3000  # the input, and not the bias
        assert not touched


def test_workspaces_hold_what_a_kernel_makes_although_nobody_asked() -> None:
    """Gradients of a convolution; copies of the indices of all bags that are not empty, in mode ``max``."""
    torch = pytest.importorskip("torch")
    from remat.torch.measuring import timing

    call = [tensor(*shape) for shape in ([3, 16, 7], [3, 16, 7], [16, 16, 3])]
    options = ([16], [1], [1], [1], False, [0], 1)
    asked, masked = (
        json.loads(signature("aten.convolution_backward.default", *call, *options, [True, weight, True]))
        for weight in (True, False)
    )
    made = timing.rebuilt_call(masked, "cpu")[0]()[1]
    expected = timing.workspace(asked, "cpu") + (0 if made is None else 16 * 16 * 3 * torch.float32.itemsize)
    assert timing.workspace(masked, "cpu") == expected

    bags, width = 45, 16
    of_indices = [[360], [bags], [0], [bags], [bags, width]]  # indices, offsets, bags, sizes, largest
    tensors = [tensor(bags, width), *(tensor(*shape, dtype="int64") for shape in of_indices)]
    bagged = json.loads(signature("aten._embedding_bag_backward.default", *tensors, 2, False, 2, False, None))
    assert timing.workspace(bagged, "cpu") >= bags * width * torch.int64.itemsize


def test_profile_refuses_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(profile_module, "_available_bytes", lambda: 10**9)
    graph = graph_of({"aten.relu": signature("aten.relu.default", tensor(4))}, [10**9])
    with pytest.raises(InvalidInput, match=r"'0' \(aten.relu\) needs about 2.00 GB .*use a smaller batch_size="):
        profiled(graph, Path())


def test_roofline_against_measured_p100_times(instances: Path) -> None:
    for name, operations in roofline_check.NETWORKS.items():
        document = read_costs(instances / MONET_COSTS.format(name.partition("_b")[0]))
        assert [op.kind for op in operations] == [node["kind"] for node in document["operations"]]
    found = {}
    for name in roofline_check.FITTED:
        published = json.loads((instances / "p100" / f"{name}.json").read_text())["nodes"]
        assert [op.kind for op in roofline_check.NETWORKS[name]] == [node["op"] for node in published]
        found[name] = roofline_check.timed(name, [node["cost"] for node in published])
    gpu = load_gpu("p100")
    for name, pairs in found.items():
        rest = [pair for other, them in found.items() if other != name for pair in them]
        rank, error, total = roofline_check.scores(pairs, replace(gpu, efficiency=roofline_check.fit(rest, gpu)))
        assert rank > 0.95
        assert error < 0.10
        assert 0.85 < total < 1.15
