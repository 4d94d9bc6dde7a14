"""Pickles of monet-schedules: graphs from look-alikes of MONeT's classes, and what is refused without running."""

from __future__ import annotations

import builtins
import os
import pickle
import subprocess
import sys
import types
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import refused, run_python

import remat
from remat import Plan, simulate
from remat.cli import main
from remat.frontends import _monet_pickle
from remat.frontends.monet_schedules import NoGraph, import_clone, load_monet

KIB, MIB = 1024, 1024 * 1024


CLASSES = {
    "monet": "", "monet.graph": "Node Input Param ComputeNode Graph",
    "monet.solver_info": "SolverNode FwdNode BwdNode IntNode SolverInfo",
    "monet.pipelined_solver_info": "PipelinedSolverInfo", "monet.cvxpy_solver": "Solution",
    "monet.elsewhere": "Stranger",
}  # fmt: skip


class Fakes:
    """Classes under the module names of MONeT, with attributes instead of its code."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module, names in CLASSES.items():
            made = types.ModuleType(module)
            monkeypatch.setitem(sys.modules, module, made)
            for name in names.split():
                self.__dict__[name] = made.__dict__[name] = type(name, (), {"__module__": module})
        for name in ("V", "D"):
            nested = type(name, (), {"__module__": "monet.graph", "__qualname__": f"ComputeNode.{name}"})
            setattr(self.ComputeNode, name, nested)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def made(self, cls: type, **attributes: Any) -> Any:
        made = cls()
        made.__dict__.update(attributes)
        return made


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    return Fakes(monkeypatch)


def node(
    fakes: Fakes, cls: str, op: str, args: list[list[int]], mem: Any, ms: Any, mib: Any = None, **more: Any
) -> Any:
    """A node with everything that MONeT stores, whether it is read or not."""
    ms, mib = [np.float32(x) for x in ms], [0.0] * len(ms) if mib is None else mib
    gnode = fakes.made(
        fakes.ComputeNode, shape=[-1, 4, 8, 8], _op=op, id=0, _has_backward=True, _is_depthwise=False,
        _args=[fakes.made(fakes.ComputeNode.D, index=0, requires_grad=True), fakes.made(fakes.ComputeNode.V, value=1)],
    )  # fmt: skip
    rest = {
        "input_shapes": [], "output_shapes": [[-1, 4, 8, 8]], "local_tensors": {0, 1}, "local_memory": np.int64(5),
        "fixed_mem": np.int64(10_000), "last_used": -1, "recompute_workspace_mem": mib,
        "recompute_workspace_compute": ms, "inplace_workspace_mem": mib, "inplace_workspace_compute": ms,
    }  # fmt: skip
    rest |= {"fwd_node": gnode} if cls == "BwdNode" else {"gnode": gnode}
    return fakes.made(
        getattr(fakes, cls), op=op, args=args, mem=mem, workspace_compute=ms, workspace_mem=mib, **(rest | more)
    )


def solver_info(fakes: Fakes) -> Any:
    """conv -> relu (with a mask) -> addmm -> loss and backward, as in mode inplace_conv_multiway_newnode.

    Node 2 is relu's mask. Relu's gradient has three ways: from its input, its output, the mask.
    """
    size = np.int64(10_000)
    nodes = [
        node(fakes, "FwdNode", "aten::_convolution", [[]], size, [2.0, -1000.0, 0.123], [0.0, 0.0, 0.5]),
        node(fakes, "FwdNode", "aten::relu_", [[0]], size, [1.0, 1.0, 1.25], has_intermediates=True,
             inplace_workspace_compute=[0.5, 0.5, 0.75], inplace_workspace_mem=[-10_000 / MIB] * 3),
        node(fakes, "IntNode", "int::BinaryActReLU", [[1]], 313, [0.25], solver_parent_id=1, op_idx=2),
        node(fakes, "FwdNode", "aten::addmm", [[1]], np.int64(4096), [0.5]),
        node(fakes, "FwdNode", "loss::loss", [[3]], np.int64(4096), [0], [0]),
        node(fakes, "BwdNode", "aten::addmm_param_grad", [[1, 4]], 0, [0.5], fwd_id=3),
        node(fakes, "BwdNode", "aten::addmm_ip_grad", [[4]], size, [0.5], fwd_id=3),
        node(fakes, "BwdNode", "aten::relu__ip_grad", [[0, 6], [1, 6], [2, 6]], size, [1.0, 0.9, 0.7],
             [0.0, 0.0, -1.0], fwd_id=1),
        node(fakes, "BwdNode", "aten::_convolution_param_grad", [[7]], 0, [3.0, 1.0], [0.0, 2.0], fwd_id=0),
    ]  # fmt: skip
    lists = defaultdict()  # as in MONeT, without a default
    lists.update({0: 0, 8: 1})
    return fakes.made(
        fakes.SolverInfo, nodes=dict(enumerate(nodes)), newnodes=[2], loss=4, edge_list=[(0, 1, 0), (1, 3, 0)], bs=7,
        model_name="tiny", mode="conv_multiway_newnode", select_conv_algo=True, do_inplace=True, compute_newnode=True,
        conv_list=lists, inplace_list={1: 0, 2: 0}, solver_to_graph=[0, 1, -1], graph_to_solver={0: 0}, fwd_to_bwd={},
        bwd_to_fwd={}, data_path="tiny_7_x", size=9, num_conv_algos=8,
    )  # fmt: skip


def write(path: Path, document: Any, protocol: int = 3) -> Path:
    path.write_bytes(pickle.dumps(document, protocol=protocol))
    return path


def test_a_solution_becomes_a_graph_with_its_implementations(tmp_path: Path, fakes: Fakes) -> None:
    arrays = dict.fromkeys(("r", "s", "m", "rf", "ip", "p"), np.ones((5, 5)))
    solution = fakes.made(fakes.Solution, **arrays, solve_time=1.0, runtime_expected=np.float64(3))
    document, path = [solver_info(fakes), solution], tmp_path / "solution_tiny_7_x_5.00.pkl"
    graph, *others = (load_monet(write(path, document, protocol)) for protocol in (2, 3, 4))
    assert all(graph == other for other in others)
    assert (graph.name, graph.cost_unit, graph.fixed_bytes) == ("tiny_b7_inplace_conv_multiway_newnode", "ns", 10 * KIB)
    assert [op.kind for op in graph.operations] == [
        "aten::_convolution", "aten::relu_", "aten::addmm", "loss::loss", "aten::addmm_param_grad",
        "aten::addmm_ip_grad", "aten::relu__ip_grad", "aten::_convolution_param_grad",
    ]  # fmt: skip
    assert [op.is_backward for op in graph.operations] == [False] * 4 + [True] * 4
    assert graph.loss == 3
    assert [v.bytes for v in graph.values] == [10 * KIB, 10 * KIB, 4 * KIB, 4 * KIB, 0, 10 * KIB, 10 * KIB, 0, 0]
    assert graph.n_extra == 1  # the mask of 313 bytes is the last value, rounded to 0 KiB
    conv, relu, *_, relu_grad, conv_grad = graph.operations
    assert (conv.inputs, conv.outputs, conv.cost, conv.workspace_bytes) == ((), (0,), 2_000_000, 0)
    assert (relu_grad.inputs, relu_grad.cost) == ((0, 5), 1_000_000)
    ways = [(w.name, w.inputs, w.outputs, w.cost, w.workspace_bytes, w.overwrites)
            for op in (conv, relu, relu_grad, conv_grad) for w in op.implementations]  # fmt: skip
    assert ways == [
        ("algorithm_2", (), (0,), 120_000, MIB // 2, None),
        ("BinaryActReLU", (0,), (1, 8), 1_250_000, 0, None),
        ("in_place", (0,), (1,), 500_000, 0, 0),
        ("in_place_BinaryActReLU", (0,), (1, 8), 750_000, 0, 0),
        ("output", (1, 5), (6,), 900_000, 0, None),
        ("BinaryActReLU", (5, 8), (6,), 700_000, 0, None),
        ("algorithm_1", (6,), (7,), 1_000_000, 2 * MIB, None),
    ]
    names = ["", "in_place_BinaryActReLU", *[""] * 4, "BinaryActReLU", ""]
    # The convolution's output is gone when the gradient is computed.
    trace = simulate(graph, Plan.from_order(graph, range(8), implementations=names))
    assert trace.cost == (200 + 75 + 50 + 0 + 50 + 50 + 70 + 300) * 10_000
    gradient = document[0].nodes[7]  # a mask that every way needs is an ordinary output
    gradient.args, gradient.workspace_compute = [[2, 6]], [0.7]
    graph = load_monet(write(path, document))
    assert (graph.n_extra, graph.operations[1].outputs, graph.operations[6].inputs) == (0, (1, 2), (2, 6))


def test_costs_alone_become_a_graph_where_the_network_is_known(tmp_path: Path) -> None:
    def lists(value: float, n: int) -> Any:
        made = defaultdict(list)
        made.update({k: [np.float32(value)] for k in range(n)})
        return made

    known = [lists(x, 97) for x in (0.5, 2.0, 0.5, 2.0, 0.5, 2.0)]
    graph = load_monet(write(tmp_path / "cost_vgg16_176_normal.pkl", known))
    assert (graph.name, len(graph)) == ("vgg16_b176", 97)
    assert {(op.cost, op.workspace_bytes) for op in graph.operations} == {(2_000_000, MIB // 2)}
    with pytest.raises(NoGraph, match="costs without a graph"):
        load_monet(write(tmp_path / "cost_vgg16_176_inplace_newnode.pkl", known))
    with pytest.raises(NoGraph, match="costs of 97 nodes, but this project's unet_b11 has 154"):
        load_monet(write(tmp_path / "cost_un_11_normal.pkl", known))


def test_a_clone_is_imported_once_per_model_batch_and_mode(
    tmp_path: Path, fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    clone = tmp_path / "clone"
    (clone / "monet_tiny").mkdir(parents=True)
    for budget in ("5.00", "6.00"):
        write(clone / "monet_tiny" / f"solution_tiny_7_newnode_{budget}.pkl", [solver_info(fakes), None])
    write(clone / "cost_tiny_7_newnode.pkl", [{}] * 6)
    write(clone / "cost_tiny_8_newnode.pkl", [{}] * 6)
    (clone / "monet_tiny" / "a_log_without_suffix").write_text("text")
    assert [(i.path.name, i.graph is not None) for i in import_clone(clone)] == [
        ("solution_tiny_7_newnode_5.00.pkl", True),
        ("cost_tiny_8_newnode.pkl", False),
    ]
    out = tmp_path / "out"
    assert main(["import-monet", str(clone), "--out", str(out)]) == 0
    written, skipped = capsys.readouterr()
    assert "tiny_b7_inplace_conv_multiway_newnode.json: 8 operations, 7 other implementations" in written
    assert skipped.startswith("skipped: ")
    assert skipped.count("\n") == 1
    (path,) = out.iterdir()
    assert remat.load_graph(path).sha256() == load_monet(next(clone.rglob("solution*.pkl"))).sha256()


class Call:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any):
        self.called = function, arguments

    def __reduce__(self) -> Any:
        return self.called


@pytest.mark.parametrize("protocol", [0, 2, 5])
@pytest.mark.parametrize(
    ("function", "named", "nested"),
    [
        (os.system, rf"{os.system.__module__}\.system", False),
        (os.system, rf"{os.system.__module__}\.system", True),
        (builtins.exec, r"builtin\w*\.exec", False),
        (subprocess.Popen, r"(subprocess|commands)\.Popen", True),
        (np.load, r"numpy\.load", False),
    ],
)
def test_calls_are_refused_and_not_run(
    tmp_path: Path, fakes: Fakes, function: Any, named: str, nested: bool, protocol: int
) -> None:
    witness = tmp_path / "witness"
    document: Any = Call(function, f"open({str(witness)!r}, 'w')" if function is exec else f"touch {witness}")
    if nested:
        info = solver_info(fakes) if protocol else fakes.made(fakes.SolverNode)
        info.extra = {"deep": [(1, document)]}
        document = [info, None] if protocol else [{1: [document]}]
    path = write(tmp_path / "solution_x_1_normal_5.00.pkl", document, protocol)
    with refused(named, file=path):
        load_monet(path)
    assert not witness.exists()


GADGETS = {
    "getattr of a module's function":
        b"\x80\x03cbuiltins\ngetattr\nccollections\ndefaultdict\nX\x05\x00\x00\x00__new\x86R.",
    "getattr of dunder": b"\x80\x03cbuiltins\ngetattr\ncmonet.graph\nComputeNode\nX\x09\x00\x00\x00__class__\x86R.",
    "default factory": b"\x80\x03ccollections\ndefaultdict\ncbuiltins\ngetattr\n\x85R.",
    "set of tuples": b"\x80\x03cbuiltins\nset\n]K\x01\x85a\x85R.",
    "scalar without bytes":
        b"\x80\x03cnumpy.core.multiarray\nscalar\ncnumpy\ndtype\nX\x02\x00\x00\x00f8\x85RC\x01x\x86R.",
    "scalar of objects":
        b"\x80\x03cnumpy.core.multiarray\nscalar\ncnumpy\ndtype\nX\x02\x00\x00\x00O8\x85RC\x01x\x86R.",
    "state that is no dict": b"\x80\x03cmonet.graph\nNode\n)\x81]b.",
    "arguments of a record": b"\x80\x03cmonet.graph\nNode\nK\x01\x85\x81.",
    "dotted name": b"\x80\x04\x8c\x0bmonet.graph\x8c\x18ComputeNode.D.__init__.x\x93.",
    "extension registry": b"\x80\x03\x82\x01.",
    "persistent id": b"\x80\x03K\x01Q.",
    "memo": b"\x80\x03Nr\xff\xff\xff\xff.",
    "bytearray": b"\x80\x05\x96\xff\xff\xff\xff\xff\x00\x00\x00.",
    "length": b"\x80\x04\x8e\xff\xff\xff\xff\xff\x00\x00\x00.",
    "tower": b"\x80\x03}" + b")" + b"\x85" * 60_000 + b"K\x01s.",
}  # fmt: skip


@pytest.mark.parametrize("name", GADGETS)
def test_what_stands_for_a_callable_takes_nothing_else(tmp_path: Path, name: str) -> None:
    """Gadgets out of allowed names: getattr of what is no MONeT class, defaults, sets, scalars, states."""
    path = tmp_path / "solution_x_1_normal_5.00.pkl"
    path.write_bytes(GADGETS[name])
    with refused(file=path):
        load_monet(path)


def test_reading_opens_no_tensor_and_imports_nothing_that_a_file_names(tmp_path: Path, fakes: Fakes) -> None:
    """A tensor's bytes are a pickle of their own, which a plain reader would open."""
    inner = pickle.dumps(Call(os.system, f"touch {tmp_path / 'witness'}"))

    def load_from_bytes(data: bytes) -> Any:
        raise AssertionError

    storage: Any = types.ModuleType("torch.storage")
    storage._load_from_bytes = load_from_bytes
    load_from_bytes.__module__, load_from_bytes.__qualname__ = "torch.storage", "_load_from_bytes"
    info = solver_info(fakes)
    info.nodes[0].gnode._args.append(fakes.made(fakes.ComputeNode.V, value=Call(load_from_bytes, inner)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch", types.ModuleType("torch"))
        patch.setitem(sys.modules, "torch.storage", storage)
        path = write(tmp_path / "x.pkl", [info, None])
    code = (
        "import sys; from remat.frontends.monet_schedules import load_monet; print(len(load_monet(sys.argv[1])));"
        "print([m for m in ('torch', 'monet', 'cvxpy', 'ortools') if m in sys.modules])"
    )
    assert run_python(code, str(path)).split("\n")[:2] == ["8", "[]"]
    assert not (tmp_path / "witness").exists()
    for dtype in (">f4", "<f8", ">i8", "u1", "?"):  # NumPy's scalars of either byte order become numbers
        value = np.array([1], dtype=dtype)[0]
        assert _monet_pickle.read_pickle(write(tmp_path / "y.pkl", [value])) == [value]


def test_damaged_files_are_one_line_errors(tmp_path: Path, fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    whole = pickle.dumps([solver_info(fakes), None], protocol=3)
    path = tmp_path / "solution_tiny_7_x_5.00.pkl"
    for n in (0, 500, len(whole) - 1):
        path.write_bytes(whole[:n])
        with refused("cannot be read as a pickle"):
            load_monet(path)
    path.write_bytes(whole)
    with pytest.MonkeyPatch.context() as patch, refused("larger than 1000 bytes"):
        patch.setattr(_monet_pickle, "MAX_FILE_BYTES", 1000)
        load_monet(path)
    write(path, fakes.made(fakes.Stranger))
    with refused(r"monet\.elsewhere\.Stranger"):
        load_monet(path)
    assert main(["import-monet", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.startswith("refused: ")
    assert main(["import-monet", str(tmp_path / "absent")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: i.nodes.pop(3), "not numbered"),
        (lambda i: i.nodes.update({3: 5}), "node 3 is a int"),
        (lambda i: i.__dict__.update(loss=2), "loss is node 2"),
        (lambda i: i.__dict__.pop("conv_list"), "lacks 'conv_list'"),
        (lambda i: i.nodes[1].__dict__.update(args=[[99]]), "node 1: 'args' must be lists of nodes"),
        (lambda i: i.nodes[1].__dict__.update(args=[[3]]), "before it is produced"),
        (lambda i: i.nodes[1].__dict__.update(workspace_compute=[float("nan")]), "is no number"),
        (lambda i: i.nodes[1].__dict__.update(workspace_compute=[-1.0, 1, 1]), "is -1 ms"),
        (lambda i: i.nodes[1].__dict__.update(workspace_compute=[]), "no measurement of its implementation 0"),
        (lambda i: i.nodes[1].__dict__.update(mem=-5000), "must not be negative"),
        (lambda i: i.nodes[1].__dict__.update(mem=10**40), "is no number"),
        (lambda i: i.nodes[2].__dict__.update(solver_parent_id=7), "intermediate of node 7"),
        (lambda i: i.nodes[0].__dict__.update(workspace_compute=[-1000.0]), "every algorithm of it failed"),
    ],
)
def test_wrong_contents_are_named(tmp_path: Path, fakes: Fakes, change: Any, message: str) -> None:
    info = solver_info(fakes)
    change(info)
    path = write(tmp_path / "x.pkl", [info, None])
    with refused(message, file=path):
        load_monet(path)
