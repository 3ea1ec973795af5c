//! Which memory a program's call may reach.
//!
//! The driver accepts any address of this process as host memory, so the server checks each address of a call together with its length before
//! the driver gets it. The driver makes no call but a [`Checked`] one. `functions.txt` names the length of every address parameter;
//! addresses in structures are checked where those are unpacked.

use vm_cuda_api::names::is_per_thread;
use vm_cuda_api::{FUNCTIONS, Kind, Object};

use super::session::Session;
use super::sys::Word;
use crate::wire::code;

/// A call whose address parameters only reach memory of its program.
#[derive(Clone, Copy, Debug)]
pub(super) struct Checked<'a> {
    number: usize,
    words: &'a [Word],
}

impl<'a> Checked<'a> {
    /// Checks a program's call.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if it reaches memory that the program does not have.
    pub(super) fn new(session: &Session, number: usize, words: &'a [Word]) -> Result<Self, u32> {
        let value = |at: usize| match words.get(at) {
            Some(Word::Is(value)) => *value,
            _ => 0,
        };
        for (at, parameter) in FUNCTIONS[number].parameters.iter().enumerate() {
            if let Kind::Address(extent) = parameter.kind
                && let Err(code) = reach(session, value(at), extent.bytes(value))
                && !is_recorded_fill(session, number, words)
            {
                return Err(code);
            }
        }
        Ok(Self { number, words })
    }

    /// A call that the server makes itself: its addresses are none of a program's choice.
    pub(super) fn of_server(number: usize, words: &'a [Word]) -> Self {
        Self { number, words }
    }

    pub(super) fn number(&self) -> usize {
        self.number
    }

    pub(super) fn words(&self) -> &'a [Word] {
        self.words
    }
}

/// Returns whether a call records a fill into a capture: the device then makes it, as a kernel would, and only when the graph is launched. Programs record
/// fills of addresses that they replace in the executable graph.
fn is_recorded_fill(session: &Session, number: usize, words: &[Word]) -> bool {
    const PER_THREAD: u64 = 2;
    let function = &FUNCTIONS[number];
    let stream =
        function.parameters.iter().position(|parameter| parameter.kind == Kind::Handle(Object::Stream));
    let (Some(at), true) = (stream, function.name.starts_with("cuMemset") && session.may_capture()) else {
        return false;
    };
    let Some(Word::Is(stream)) = words.get(at) else { return false };
    let stream = if *stream == 0 && is_per_thread(&function.name) { PER_THREAD } else { *stream };
    let mut memory = [0];
    let result = session.driver().named("cuStreamIsCapturing", &[Word::Is(stream), Word::At(0)], &mut memory);
    result == 0 && memory[0] & 0xffff_ffff != 0
}

/// Checks an address and a length, which is `None` if it overflows.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` unless the program has all of it.
pub(super) fn reach(session: &Session, at: u64, len: Option<u64>) -> Result<(), u32> {
    if len.is_some_and(|len| session.reaches(at, len)) { Ok(()) } else { Err(code::INVALID_VALUE) }
}

#[cfg(test)]
mod tests {
    use super::super::hand;
    use super::*;
    use crate::calls::{MODES, Mode};
    use crate::wire::node;
    use vm_cuda_api::names::base;
    use vm_cuda_api::{Extent, Function, Item, Way};

    /// Functions of which an address only names memory: the driver looks it up, frees it or returns what it knows of it, or kernels reach it later.
    const NAME_MEMORY: [&str; 12] = [
        "cuGraphAddMemFreeNode",
        "cuIpcCloseMemHandle",
        "cuIpcGetMemHandle",
        "cuMemAddressReserve",
        "cuMemFree",
        "cuMemFreeAsync",
        "cuMemFreeHost",
        "cuMemGetAccess",
        "cuMemGetAddressRange",
        "cuMemHostGetFlags",
        "cuMemRetainAllocationHandle",
        "cuPointerSetAttribute",
    ];

    /// Where the addresses in a structure are checked, or why it has none.
    fn checked_in(function: &Function, parameter: &str) -> Option<&'static str> {
        let name = base(&function.name);
        Some(match (name, parameter) {
            _ if node::SETTERS.iter().any(|(setter, _)| *setter == function.name) => "nodes::structure",
            ("cuMemcpy2D" | "cuMemcpy2DUnaligned" | "cuMemcpy2DAsync", _) => "strided::copy",
            ("cuMemcpy3D" | "cuMemcpy3DAsync" | "cuMemcpy3DPeer" | "cuMemcpy3DPeerAsync", _) => {
                "strided::copy"
            }
            ("cuStreamBatchMemOp", "paramArray") => "special::operations",
            ("cuTexObjectCreate" | "cuSurfObjectCreate", "pResDesc") => "objects::resource",
            ("cuStreamSetAttribute" | "cuGraphKernelNodeSetAttribute", "value") => "special::attribute",
            ("cuLaunchKernel" | "cuLaunchCooperativeKernel" | "cuLaunchKernelEx", _) => {
                "parameters are opaque to the driver, and hand::config passes no attribute with an address"
            }
            ("cuOccupancyMaxActiveClusters" | "cuOccupancyMaxPotentialClusterSize", _) => "hand::config",
            (_, "srcHost" | "dstHost") => "hand::to_device and hand::to_host",
            (_, "image" | "code" | "data" | "fatCubin" | "cubinOut") => {
                "bytes of the request or of the answer"
            }
            (_, "options" | "optionValues" | "jitOptions" | "jitOptionsValues") => "Options::read",
            (_, "libraryOptions" | "libraryOptionValues") => "never passed on",
            (_, "callback" | "fn" | "userData" | "ptr" | "destroy") => "callbacks: words for the program",
            (_, "shareableHandle" | "osHandle" | "handle") => "ipc: a token of the server",
            ("cuGraphExecUpdate" | "cuGraphInstantiateWithParams", _) => "nodes: made by the server",
            (_, "paramsArray" | "ctxCreateParams") => "hand, in the program alone",
            (_, "location") => "a device",
            (_, "map" | "desc") => "devices and rights",
            (_, "prop" | "poolProps") => "kinds and a device; a pointer that only Windows reads",
            (_, "dependencyData" | "edgeData") => "kinds of edges",
            (_, "pAllocateArray" | "pMipmappedArrayDesc") => "sizes and a format",
            (_, "pTexDesc" | "pResViewDesc") => "modes and sizes",
            (_, "tensorMap") => "for kernels",
            _ => return None,
        })
    }

    #[test]
    fn every_parameter_that_crosses_and_has_an_address_is_checked() {
        let crossing = FUNCTIONS.iter().zip(MODES.iter());
        let crossing = crossing.filter(|(_, mode)| !matches!(mode, Mode::Unsupported | Mode::Here));
        let mut addresses = 0;
        for (function, mode) in crossing {
            for parameter in &function.parameters {
                let place = format!("{} {}", function.name, parameter.name);
                match parameter.kind {
                    Kind::Address(Extent::None) => {
                        let name = base(&function.name);
                        let is_known = NAME_MEMORY.contains(&name)
                            || ["cuPointerGetAttribute", "cuTensorMap"]
                                .iter()
                                .any(|begin| name.starts_with(begin));
                        assert!(is_known, "{place}");
                    }
                    Kind::Address(_) => addresses += 1,
                    Kind::Other | Kind::Value(_) => {
                        assert!(
                            checked_in(function, &parameter.name).is_some() || returns(function),
                            "{place}"
                        );
                        assert_eq!(*mode, Mode::Hand, "{place}");
                    }
                    Kind::Pointer { way: Way::In | Way::InOut, item: Item::Bytes(9..), .. } => {
                        assert!(checked_in(function, &parameter.name).is_some(), "{place}");
                    }
                    _ => {}
                }
            }
        }
        assert!(addresses >= 80, "{addresses}");
        // These structures have handlers.
        for name in ["cuMemcpy2D_v2", "cuStreamBatchMemOp_v2", "cuStreamSetAttribute", "cuTexObjectCreate"] {
            assert!(hand::is_made_by_hand(vm_cuda_api::number(name).unwrap()), "{name}");
        }
    }

    /// Does a function only return structures?
    fn returns(function: &Function) -> bool {
        function.name.contains("GetParams")
            || function.name.starts_with("cuStreamGetCaptureInfo")
            || function.name.starts_with("cuPointerGetAttributes")
    }
}
