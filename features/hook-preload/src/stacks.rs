//! Which call stacks allocated: recorded once somebody asked or `VMM_STACKS` is 1, named when they are told.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

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

/// What is at return addresses, without the hook's own functions: a name if its file exports it, else the place in the file.
pub(crate) fn names(stack: &Stack) -> Vec<String> {
    let own = sys::file_of(names as *const () as usize).map(|place| place.base);
    let places = stack.iter().map(|address| (address, sys::file_of(address.saturating_sub(1))));
    let outer =
        places.skip_while(|(_, place)| own.is_some() && place.as_ref().map(|place| place.base) == own);
    let name = |(address, place): (&usize, Option<sys::InFile>)| match place {
        None => format!("{address:#x}"),
        Some(place) => {
            let at = format!("{}+{:#x}", place.file, address - place.base);
            place.name.map_or(at.clone(), |name| format!("{name} ({at})"))
        }
    };
    outer.map(name).collect()
}
