"""Pages of sequences on several devices: the tables and lengths of each."""

import jax.numpy as jnp
import numpy as np

from ejkernel.types.serving.sharded_pages import local_rows
from ejkernel.types.serving.write import row_positions


def test_every_visible_key_is_on_one_device_and_in_its_order():
    rng = np.random.default_rng(0)
    n, columns, page_size, total, devices = 3, 6, 4, 24, 4
    tables = rng.permutation(total)[: n * columns].reshape(n, columns).astype(np.int32)
    sequence = np.repeat(np.arange(n), 9)
    visible = rng.integers(-1, columns * page_size + 3, sequence.size)
    found = [[] for _ in sequence]
    for device in range(devices):
        pages = total // devices
        sizes = pages, total, page_size
        local, lengths = local_rows(
            jnp.asarray(tables), sequence, jnp.asarray(visible), device * pages, sizes
        )
        for row, (table, length) in enumerate(zip(local, lengths, strict=True)):
            ids = np.asarray(table) + device * pages
            keys = [(ids[j // page_size], j % page_size) for j in range(int(length))]
            order = [list(tables[sequence[row]]).index(page) * page_size + j for page, j in keys]
            assert order == sorted(order)
            found[row] += order
    for keys, count in zip(found, visible, strict=True):
        assert sorted(keys) == list(range(np.clip(count, 0, columns * page_size)))


def test_positions_of_packed_rows():
    lengths, starts = jnp.asarray([9, 3, 2, 7]), jnp.asarray([0, 2, 2, 6, 0])
    sequence, position = row_positions(lengths, starts, 3, 8, 20)
    assert sequence[:6].tolist() == [0, 0, 2, 2, 2, 2]
    assert position.tolist() == [7, 8, -1, -1, 0, 1, -1, -1]
