"""Print the number of worker threads of the default group of gloo, and of a second one, once both work."""

import torch
import torch.distributed as dist

if __name__ == "__main__":
    dist.init_process_group("gloo")
    for group in (dist.group.WORLD, dist.new_group(backend="gloo")):
        ranks = torch.ones(1)
        dist.all_reduce(ranks, group=group)
        assert ranks.item() == 2
        print(group._get_backend(torch.device("cpu")).options._threads)
    dist.destroy_process_group()
