"""Compile the kernel for sm_90a on a machine without a GPU; prints ptxas' report as JSON.

Run by test_compiled.py in a process of its own: the environment must be set before JAX starts. Needs the CUDA
plugin of JAX and a CUDA toolkit.
"""

import json
import os
import pathlib
import re
import sys
import tempfile

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 150000000000
  cuda_compute_capability { major: 9 minor: 0 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""


def main() -> None:
    batch, tokens, heads, parts = (int(x) for x in sys.argv[1:5])
    q_dtype, cache_dtype = sys.argv[5:]
    folder = tempfile.mkdtemp()
    os.environ["MOSAIC_GPU_DUMP_TO"] = folder
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies

    from mla_jax.attention.mosaic_gpu.config import KernelConfig
    from mla_jax.attention.mosaic_gpu.ds_launch import decode_ds_with, ds_config_for
    from mla_jax.attention.mosaic_gpu.fp8_launch import decode_fp8_with, fp8_config_for
    from mla_jax.attention.mosaic_gpu.launch import decode_with
    from mla_jax.schedule import tile_schedule

    topology = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1")
    mesh = jax.sharding.Mesh(topology.devices, ("x",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def array(*shape: int, dtype: jnp.dtype = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

    def call(q, cache, table, lens, scale, schedule):
        args = (q, cache, table, lens, scale)
        if cache_dtype == "float8_e4m3fn":
            return decode_fp8_with(fp8_config_for(q), *args, scale, None, schedule, causal=True)
        if cache_dtype == "uint8":
            return decode_ds_with(ds_config_for(q), *args, None, schedule, causal=True)
        return decode_with(KernelConfig(), *args, None, schedule, causal=True)

    jax.jit(call).lower(
        array(batch, tokens, heads, 576, dtype=jnp.dtype(q_dtype)),
        array(64, 64, 656 if cache_dtype == "uint8" else 576, dtype=jnp.dtype(cache_dtype)),
        array(batch, 16),
        array(batch),
        array(1, dtype=jnp.float32),
        jax.tree.map(lambda x: array(*x.shape), jax.eval_shape(lambda n: tile_schedule(n, parts), array(batch))),
    ).compile()
    (report,) = (path.read_text() for path in pathlib.Path(folder).glob("*.ptxas"))
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", report)]
    print(json.dumps({"spill_bytes": max(spills, default=0), "warnings": re.findall(r"\((C75\d\d)\)", report)}))


if __name__ == "__main__":
    main()
