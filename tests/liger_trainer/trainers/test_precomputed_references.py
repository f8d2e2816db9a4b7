"""TRL computes a reference's log-probs before accelerate has given the model's weights to all processes."""

import torch
from launching import in_processes_fsdp2
from precomputed_ranks import KINDS, columns_of, write_rows


def test_of_an_adapter_under_fsdp2(tmp_path):
    """Each process scores its own rows. With transformers 5.17, only the first has read the weights by then."""
    apart, alone = tmp_path / "apart", tmp_path / "alone"
    for folder in (apart, alone):
        folder.mkdir()
        write_rows(folder)
    in_processes_fsdp2(apart, "precomputed_ranks.py", apart)
    for rank in (0, 1):
        found = torch.load(apart / f"{rank}.pt")
        for kind in KINDS:
            want = columns_of(kind, alone)
            assert len(want) >= 2
            for name, values in want.items():
                rtol = 1e-4 if name.startswith("ref_") else 1e-2  # at the first loss, the adapter is zero
                torch.testing.assert_close(found[kind][name], values, rtol=rtol, atol=0, msg=f"{kind} {name}")
