//! Calls functions of the program.

use vm_bridge::wire::control;

/// Calls one that a stream calls: what it is, function, argument, stream, status.
pub(crate) fn call([kind, function, argument, stream, status]: [u64; control::CALL]) {
    type Function = extern "C" fn(u64);
    type Callback = extern "C" fn(u64, u32, u64);
    if kind == control::FUNCTION {
        // SAFETY: it is the function that the program gave to `cuLaunchHostFunc`.
        let function = unsafe { std::mem::transmute::<usize, Function>(function as usize) };
        function(argument);
    } else {
        // SAFETY: it is the function that the program gave to `cuStreamAddCallback`.
        let function = unsafe { std::mem::transmute::<usize, Callback>(function as usize) };
        function(stream, status as u32, argument);
    }
}

/// How many bytes of shared memory a block of so many threads takes, as a `CUoccupancyB2DSize` says.
pub(crate) fn shared(function: usize, threads: u32) -> usize {
    type Function = extern "C" fn(u32) -> usize;
    // SAFETY: it is the function that the program gave to `cuOccupancyMaxPotentialBlockSize`, and is called before that returns.
    let function = unsafe { std::mem::transmute::<usize, Function>(function) };
    function(threads)
}
