//! Models on NPUs, compiled once for each device, set of libraries and options.

use vm_graph::{GraphError, ValidGraph, encode};
use vm_jit::cache::{Cache, Key};
pub use vm_npu::{self as npu, NpuAccelerator};
use vm_npu::{NpuContext, NpuError, NpuExecutable};

/// Compiles a graph for a context, or loads what was compiled of it before. What a cache has and no context takes is thrown away.
///
/// # Errors
/// As [`NpuContext::compile`].
pub fn compile_graph(
    accelerator: &NpuAccelerator,
    context: &NpuContext,
    graph: &ValidGraph,
    cache: &Cache,
) -> Result<NpuExecutable, NpuError> {
    let provider = accelerator.provider();
    let refused = |error: GraphError| NpuError::Refused { provider, what: error.to_string() };
    let bytes = encode(graph).map_err(refused)?;
    let key = Key::of("npu", &[accelerator.identity(context.options()).as_bytes(), &bytes]);
    if let Some(blob) = cache.get(&key) {
        match context.load_blob(graph, blob) {
            Ok(model) => return Ok(model),
            Err(NpuError::Refused { what, .. } | NpuError::Fallback { what, .. }) => {
                tracing::warn!("a compiled model of {} is compiled again: {what}", graph.name);
                cache.remove(&key);
            }
            Err(error) => return Err(error),
        }
    }
    let model = context.compile(graph)?;
    if !model.blob().is_empty() {
        cache.put(&key, model.blob().clone());
    }
    Ok(model)
}
