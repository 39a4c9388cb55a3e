"""Packets and shared memory: exact, or refused."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import InferenceError, RequestError
from slipstream.inference.checksum import tensor_checksum
from slipstream.inference.transfer.memory import Segment, attach
from slipstream.inference.transfer.packet import Mirror, Packet, catch_up, join, write_anchor, write_delta
from slipstream.inference.transfer.raw import Raw, cut, lay_out
from slipstream.inference.transfer.receiver import Receiver


def raws(arrays):
    return {name: Raw.of(array) for name, array in arrays.items()}


def model(seed, n=1000):
    rng = np.random.default_rng(seed)
    return {"w": rng.standard_normal((n, 4)).astype(np.float32), "b": rng.standard_normal(n).astype(np.float16)}


def nudged(arrays, share, seed):
    """Some elements moved by one unit in the last place, as a step of the optimiser does."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, array in arrays.items():
        moved = rng.random(array.shape) < share
        out[name] = np.where(moved, np.nextafter(array, np.asarray(9, array.dtype)), array).astype(array.dtype)
    return out


def same(mirror, arrays):
    return all(np.array_equal(mirror.tensors[name].numpy(), array) for name, array in arrays.items())


@pytest.fixture
def chain(tmp_path):
    """An anchor and four deltas with the weights at each version."""
    states = [model(0)]
    paths = [tmp_path / "v0"]
    write_anchor(paths[0], raws(states[0]), "v0")
    for i in range(1, 5):
        states.append(nudged(states[-1], 0.02, i))
        paths.append(tmp_path / f"v{i}")
        write_delta(paths[i], raws(states[i - 1]), raws(states[i]), f"v{i - 1}", f"v{i}")
    return states, paths


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.float64, np.int64])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.9, 1.0])
def test_any_change_is_reconstructed_exactly(tmp_path, dtype, share):
    rng = np.random.default_rng(1)
    old = rng.integers(0, 256, 8 * 777, np.uint8).view(dtype)
    new = np.where(rng.random(old.shape) < share, rng.integers(0, 256, old.nbytes, np.uint8).view(dtype), old)
    write_anchor(tmp_path / "a", raws({"w": old}), "v0")
    write_delta(tmp_path / "d", raws({"w": old}), raws({"w": new}), "v0", "v1")
    mirror = Mirror()
    mirror.apply(tmp_path / "a")
    mirror.apply(tmp_path / "d")
    assert mirror.tensors["w"].data.tobytes() == new.tobytes()


@settings(max_examples=25, deadline=None)
@given(
    old=st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=40),
    change=st.dictionaries(st.integers(0, 39), st.integers(0, 2**16 - 1)),
)
def test_words_of_every_value_survive_the_difference(tmp_path_factory, old, change):
    folder = tmp_path_factory.mktemp("words")
    before = np.array(old, np.uint16)
    after = before.copy()
    for place, value in change.items():
        after[place % len(after)] = value
    write_anchor(folder / "a", raws({"w": before}), "v0")
    write_delta(folder / "d", raws({"w": before}), raws({"w": after}), "v0", "v1")
    mirror = Mirror()
    catch_up(mirror, [folder / "a", folder / "d"])
    assert np.array_equal(mirror.tensors["w"].numpy(), after)


def test_torch_and_numpy_share_one_packet_format(tmp_path):
    torch = pytest.importorskip("torch")
    old = torch.randn(500, 3, dtype=torch.bfloat16)
    new = (old.float() * 1.003).to(torch.bfloat16)
    write_anchor(tmp_path / "a", raws({"w": old}), "v0")
    write_delta(tmp_path / "d", raws({"w": old}), raws({"w": new}), "v0", "v1")
    mirror = Mirror()
    catch_up(mirror, [tmp_path / "a", tmp_path / "d"])
    assert torch.equal(mirror.tensors["w"].torch(), new)
    assert mirror.tensors["w"].checksum() == tensor_checksum(new)


def test_small_steps_make_small_packets(tmp_path):
    states = [model(0, 100_000)]
    states.append(nudged(states[0], 0.01, 1))
    full = write_anchor(tmp_path / "a", raws(states[0]), "v0")
    assert write_delta(tmp_path / "d", raws(states[0]), raws(states[1]), "v0", "v1") < 0.01 * full


def test_a_receiver_reads_only_what_it_lacks(chain):
    states, paths = chain
    mirror = Mirror()
    assert catch_up(mirror, paths[:3]) == paths[:3]
    assert catch_up(mirror, paths) == paths[3:]
    assert catch_up(mirror, paths) == []
    assert same(mirror, states[4])


def test_packets_joined_lead_to_the_same_weights(chain, tmp_path):
    states, paths = chain
    join(tmp_path / "joined", paths[1:4])
    mirror = Mirror()
    catch_up(mirror, [paths[0], tmp_path / "joined", paths[4]])
    assert same(mirror, states[4])


def test_only_consecutive_deltas_are_joined(chain, tmp_path):
    _, paths = chain
    for wrong in ([paths[1], paths[3]], [paths[0], paths[1]]):
        with pytest.raises(InferenceError, match=r"follows v2, not v1|an anchor cannot be joined"):
            join(tmp_path / "joined", wrong)


def test_dropped_packet_is_refused_and_changes_nothing(chain):
    states, paths = chain
    mirror = Mirror()
    catch_up(mirror, paths[:2])
    paths[2].unlink()
    with pytest.raises(InferenceError, match="v2: cannot read this packet"):
        catch_up(mirror, paths)
    assert (mirror.version, same(mirror, states[1])) == ("v1", True)


def test_reordered_packets_are_refused_and_change_nothing(chain):
    states, paths = chain
    mirror = Mirror()
    catch_up(mirror, paths[:2])
    with pytest.raises(InferenceError, match="follows v2, this receiver holds v1"):
        mirror.apply(paths[3])
    assert (mirror.version, same(mirror, states[1])) == ("v1", True)


def test_duplicated_packets_change_nothing(chain):
    states, paths = chain
    mirror = Mirror()
    catch_up(mirror, [*paths[:3], paths[2], *paths[2:]])
    assert same(mirror, states[4])


@pytest.mark.parametrize("where", [0.1, 0.5, 0.9, 0.999])
def test_torn_packet_is_refused_and_changes_nothing(chain, where):
    states, paths = chain
    mirror = Mirror()
    catch_up(mirror, paths[:4])
    data = paths[4].read_bytes()
    paths[4].write_bytes(data[: int(where * len(data))])
    with pytest.raises(InferenceError, match=r"cannot read|damaged|missing"):
        catch_up(mirror, paths)
    assert (mirror.version, same(mirror, states[3])) == ("v3", True)


def test_every_flipped_byte_is_noticed(chain):
    states, paths = chain
    data = bytearray(paths[4].read_bytes())
    for place in np.linspace(0, len(data) - 1, 30).astype(int):
        bad = bytearray(data)
        bad[place] ^= 0x10
        paths[4].write_bytes(bad)
        mirror = Mirror()
        catch_up(mirror, paths[:4])
        try:
            mirror.apply(paths[4])
        except InferenceError:
            assert same(mirror, states[3])
        else:
            # Padding between the header and the data may differ; the weights may not.
            assert same(mirror, states[4])


def test_a_packet_of_other_weights_under_the_right_name_is_refused(chain, tmp_path):
    _, paths = chain
    mirror = Mirror()
    catch_up(mirror, paths[:2])
    other = model(9)
    write_delta(tmp_path / "x", raws(other), raws(nudged(other, 0.1, 1)), "v1", "v2")
    with pytest.raises(InferenceError, match="follows v1, this receiver holds v1"):
        mirror.apply(tmp_path / "x")


def test_a_mirror_that_changed_behind_our_back_is_lost_and_mends_with_an_anchor(chain):
    states, paths = chain
    mirror = Mirror()
    catch_up(mirror, paths[:4])
    mirror.tensors["w"].numpy()[0, 0] += 1
    with pytest.raises(InferenceError, match="not those that were sent"):
        mirror.apply(paths[4])
    assert mirror.version is None
    catch_up(mirror, paths)
    assert same(mirror, states[4])


def test_changed_shapes_need_an_anchor(tmp_path):
    with pytest.raises(InferenceError, match="needs an anchor"):
        write_delta(tmp_path / "d", raws(model(0)), raws(model(0, 10)), "v0", "v1")


def test_header_says_how_each_tensor_travels(tmp_path):
    old = model(0)
    write_delta(tmp_path / "d", raws(old), raws({**nudged(old, 0.01, 1), "b": old["b"]}), "v0", "v1")
    assert {b.name: b.mode for b in Packet(tmp_path / "d").header.blocks} == {"w": "sparse", "b": "same"}


# ---- tables and memory


def test_tables_that_do_not_fit_the_buffer_are_refused():
    table, size = lay_out([("a", "float32", (3,)), ("b", "bfloat16", (5,))])
    buffer = np.zeros(size, np.uint8)
    assert {name: raw.shape for name, raw in cut(buffer, table).items()} == {"a": (3,), "b": (5,)}
    for wrong in (table[1]._replace(offset=64 * 9), table[1]._replace(offset=3), table[1]._replace(shape=(99,))):
        with pytest.raises(InferenceError, match="do not fit"):
            cut(buffer, [wrong])
    with pytest.raises(InferenceError, match="twice"):
        cut(buffer, [table[0], table[0]])


def test_a_reader_cannot_change_the_owners_weights():
    segment = Segment.create(8)
    segment.data[:] = 1
    attach(segment.path, 8)[:] = 2
    assert segment.data.tolist() == [1] * 8
    segment.close()


def test_a_mapping_outlives_the_owners_close():
    segment = Segment.create(4)
    segment.data[:] = 5
    view = attach(segment.path, 4)
    segment.close()
    assert view.tolist() == [5] * 4


def test_closed_or_foreign_segments_are_refused(tmp_path):
    segment = Segment.create(4)
    with pytest.raises(InferenceError, match="holds 4 bytes, 5 were announced"):
        attach(segment.path, 5)
    path = segment.path
    segment.close()
    with pytest.raises(InferenceError, match=r"cannot attach|not a segment"):
        attach(path, 4)
    with pytest.raises(InferenceError, match="not a shared-memory segment"):
        attach("/etc/passwd", 4)
    with (tmp_path / "f").open("w") as file, pytest.raises(InferenceError, match="not a segment of weights"):
        attach(f"/proc/{os.getpid()}/fd/{file.fileno()}", 1)


def test_more_memory_than_there_is_is_refused_before_the_kernel_is_asked(monkeypatch):
    # An anonymous file has no quota: asking the kernel for too much would end in its out-of-memory killer.
    monkeypatch.setattr(os, "memfd_create", lambda *args: pytest.fail("asked the kernel"))
    with pytest.raises(InferenceError, match="cannot reserve"):
        Segment.create(1 << 60)


def test_killed_owner_leaves_no_segment(tmp_path):
    code = (
        "import os, signal, sys\n"
        "from slipstream.inference.transfer.memory import Segment\n"
        "segment = Segment.create(1 << 20)\n"
        "print(segment.path, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    before = set(os.listdir("/dev/shm"))
    path = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stdout.strip()
    with pytest.raises(InferenceError, match="cannot attach"):
        attach(path, 1)
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "slipstream" in name}


# ---- the receiver


def test_receiver_refuses_unknown_fields_and_kinds(tmp_path):
    receiver = Receiver(tmp_path)
    for wrong, named in (({"path": "x", "packed": True}, "packed"), ({"kind": "pigeon"}, "pigeon|kind")):
        with pytest.raises(RequestError, match=named):
            receiver.receive(wrong)


def test_one_name_in_two_shipments_of_an_update_is_refused(tmp_path):
    from safetensors.numpy import save_file

    save_file({"w": np.ones(2, np.float32)}, tmp_path / "a.safetensors")
    receiver = Receiver(tmp_path)
    receiver.begin()
    receiver.receive({"path": str(tmp_path / "a.safetensors")})
    with pytest.raises(RequestError, match="w was sent twice"):
        receiver.receive({"path": str(tmp_path / "a.safetensors")})
    receiver.begin()
    assert list(receiver.receive({"path": str(tmp_path / "a.safetensors")})) == ["w"]


def test_receiver_says_when_packets_lead_elsewhere(chain, tmp_path):
    _, paths = chain
    receiver = Receiver(tmp_path)
    with pytest.raises(InferenceError, match="lead to v2, not to v3"):
        receiver.receive({"kind": "delta", "version": "v3", "packets": [str(p) for p in paths[:3]]})
