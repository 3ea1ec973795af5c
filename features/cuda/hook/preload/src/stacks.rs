//! Which call stacks allocated: recorded once somebody asked or `VMM_STACKS` is 1; what is at their addresses is looked up when they are told.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use vm_hook::control::Frame;
use vm_hook::options::Options;
use vm_hook::tracker::Stack;

use crate::sys;

static RECORDED: OnceLock<AtomicBool> = OnceLock::new();

fn recorded() -> &'static AtomicBool {
    RECORDED.get_or_init(|| AtomicBool::new(Options::get().stacks))
}

/// From here on they are recorded.
pub(crate) fn record() {
    recorded().store(true, Ordering::Relaxed);
}

/// This thread's, if they are recorded.
pub(crate) fn current() -> Option<Stack> {
    recorded().load(Ordering::Relaxed).then(sys::return_addresses)
}

/// What is at return addresses, without the hook's own functions.
pub(crate) fn frames(stack: &Stack) -> Vec<Frame> {
    let own = sys::file_of(frames as *const () as usize).map(|place| place.base);
    // A call that does not return may be the last thing of a function.
    let places = stack.iter().map(|address| (*address, sys::file_of(address.saturating_sub(1))));
    let outer =
        places.skip_while(|(_, place)| own.is_some() && place.as_ref().map(|place| place.base) == own);
    let frame = |(address, place): (usize, Option<sys::InFile>)| match place {
        None => Frame { offset: address as u64, ..Frame::default() },
        Some(place) => {
            Frame { file: place.file, offset: (address - place.base) as u64, function: place.name }
        }
    };
    outer.map(frame).collect()
}
