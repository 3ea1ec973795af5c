//! What calls do to streams, as the [deadline](super::deadline) and the time slice count it: by their functions, and where in their payload a stream's handle is.

use std::sync::LazyLock;

use vm_cuda_api::names::{base, is_per_thread};
use vm_cuda_api::{FUNCTIONS, Kind, Object};

use crate::calls::{MODES, Mode};
use crate::wire::strided::Form;

/// What a call does.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Effect {
    /// A kernel is launched on the stream whose handle is that word of the payload.
    Launches(usize),
    /// A copy or a fill on such a stream, or on the default one.
    Copies(Option<usize>),
    /// What else a stream has to do, which does not keep the device busy.
    Works(usize),
    /// A graph, which is the first word, is launched on the stream of the second.
    LaunchesGraph,
    /// An executable graph, the first that is returned, is made of the graph of the second word.
    Instantiates,
    /// The executable graph of the first word is destroyed.
    DestroysGraph,
    /// The stream waits for what is no work of its own: another stream, a value, a function of the program.
    Waits(usize),
    /// The stream of that word, or all of the current context, have nothing left to do if it succeeds.
    Synchronizes(Option<usize>),
    /// A capture of the stream begins.
    Captures(usize),
    /// The stream of the first word is destroyed.
    Destroys,
    /// The primary context of the device of the second word is returned first.
    Retains,
    /// Another context may be current then.
    Switches,
    /// The context of the first word ends.
    EndsContext,
    /// The primary context of the device of the first word ends, unless others have it.
    ReleasesPrimary,
    /// The same, whoever has it.
    ResetsPrimary,
    /// All streams of a context wait, even those that are made later: nothing counts that.
    Refused,
}

/// The effect of a function, and whether its default stream is the thread's own.
pub(super) fn of(number: usize) -> Option<(Effect, bool)> {
    BY_NUMBER.get(number).copied().flatten()
}

static BY_NUMBER: LazyLock<Vec<Option<(Effect, bool)>>> = LazyLock::new(|| {
    let effect = |number: usize| {
        let function = &FUNCTIONS[number];
        let is_stream = |kind| kind == Kind::Handle(Object::Stream);
        let stream = function.parameters.iter().position(|parameter| is_stream(parameter.kind));
        known(base(&function.name), stream).filter(|_| MODES[number] != Mode::Unsupported)
    };
    let with_default = |number| Some((effect(number)?, is_per_thread(&FUNCTIONS[number].name)));
    (0..FUNCTIONS.len()).map(with_default).collect()
});

/// What is packed by hand, and what is no work but changes what is known of streams; then all else that has a stream.
fn known(name: &str, stream: Option<usize>) -> Option<Effect> {
    Some(match name {
        "cuLaunchKernel" | "cuLaunchCooperativeKernel" => Effect::Launches(8),
        "cuLaunchKernelEx" => Effect::Launches(5),
        "cuGraphLaunch" => Effect::LaunchesGraph,
        "cuGraphInstantiate" | "cuGraphInstantiateWithFlags" => Effect::Instantiates,
        "cuGraphExecDestroy" => Effect::DestroysGraph,
        "cuMemcpyHtoDAsync" | "cuMemcpyDtoHAsync" => Effect::Copies(Some(2)),
        "cuMemcpyHtoAAsync" | "cuMemcpyAtoHAsync" => Effect::Copies(Some(3)),
        "cuMemcpy2DAsync" => Effect::Copies(Some(Form::Two.words())),
        "cuMemcpy3DAsync" => Effect::Copies(Some(Form::Three.words())),
        "cuMemcpy3DPeerAsync" => Effect::Copies(Some(Form::Peer.words())),
        "cuLaunchHostFunc" | "cuStreamAddCallback" => Effect::Waits(0),
        "cuStreamSynchronize" => Effect::Synchronizes(Some(0)),
        "cuCtxSynchronize" if stream.is_none() => Effect::Synchronizes(None),
        "cuStreamDestroy" => Effect::Destroys,
        "cuDevicePrimaryCtxRetain" => Effect::Retains,
        "cuCtxCreate" | "cuCtxSetCurrent" | "cuCtxPushCurrent" | "cuCtxPopCurrent" => Effect::Switches,
        "cuCtxDestroy" => Effect::EndsContext,
        "cuDevicePrimaryCtxRelease" => Effect::ReleasesPrimary,
        "cuDevicePrimaryCtxReset" => Effect::ResetsPrimary,
        "cuCtxWaitEvent" | "cuGreenCtxWaitEvent" => Effect::Refused,
        _ if name.starts_with("cuStreamBeginCapture") => Effect::Captures(stream?),
        _ if name.starts_with("cuStreamWait") || name.starts_with("cuStreamBatchMemOp") => {
            Effect::Waits(stream?)
        }
        _ if name.starts_with("cuMemcpy") || name.starts_with("cuMemset") => Effect::Copies(stream),
        _ if name.ends_with("Async")
            || name.starts_with("cuStreamWrite")
            || name.starts_with("cuEventRecord")
            || name == "cuGraphUpload" =>
        {
            Effect::Works(stream?)
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_cuda_api::number;

    #[test]
    fn what_takes_a_stream_and_is_not_waited_for_counts() {
        let check = |name: &str, effect: Option<(Effect, bool)>| {
            assert_eq!(of(number(name).expect(name)), effect, "{name}");
        };
        check("cuLaunchKernel_ptsz", Some((Effect::Launches(8), true)));
        check("cuMemcpyDtoD_v2", Some((Effect::Copies(None), false)));
        check("cuMemsetD8_v2_ptds", Some((Effect::Copies(None), true)));
        check("cuMemcpyDtoDAsync_v2", Some((Effect::Copies(Some(3)), false)));
        check("cuMemAllocAsync", Some((Effect::Works(2), false)));
        check("cuStreamWaitEvent_ptsz", Some((Effect::Waits(0), true)));
        check("cuStreamBatchMemOp_v2", Some((Effect::Waits(0), false)));
        check("cuStreamBeginCapture_v2", Some((Effect::Captures(0), false)));
        check("cuEventRecord", Some((Effect::Works(1), false)));
        check("cuStreamSynchronize_ptsz", Some((Effect::Synchronizes(Some(0)), true)));
        check("cuCtxSynchronize", Some((Effect::Synchronizes(None), false)));
        check("cuStreamQuery", None);
        check("cuMemFree_v2", None);
        for (at, function) in FUNCTIONS.iter().enumerate().filter(|(at, _)| MODES[*at] == Mode::Posted) {
            let has_stream =
                function.parameters.iter().any(|parameter| parameter.kind == Kind::Handle(Object::Stream));
            assert!(!has_stream || of(at).is_some(), "{}", function.name);
        }
    }
}
