//! Memory of pools, which is allocated and freed in the order of a stream.

use super::*;
use crate::sys::real::{ON_DEVICE, PINNED};

/// Allocates of a pool. In a capture that makes a node of a graph, which has its memory of the graph.
fn allocated(
    to: *mut u64,
    bytes: usize,
    stream: u64,
    of_thread: bool,
    is_of_device: impl FnOnce(&Real) -> bool,
    own: impl FnOnce() -> u32,
) -> u32 {
    if let Err(Failure(code)) = ready(of_thread) {
        return code;
    }
    let counts = !to.is_null()
        && hook::is_here()
        && with(|manager| {
            let driver = manager.driver();
            let is_captured = manager.is_capturing() && driver.is_captured(stream);
            !is_captured && is_of_device(driver)
        });
    if !counts {
        return own();
    }
    // SAFETY: the driver has written it.
    natively(Kind::Pool, bytes as u64, own, || (unsafe { *to }, bytes as u64))
}

/// Is it virtual memory, and could the driver free it, if it were its own, in the order of the stream?
fn is_virtual(address: u64, stream: u64) -> bool {
    is_on()
        && with(|manager| {
            let driver = manager.driver();
            manager.tracker().at(address).is_some()
                && !manager.is_capturing()
                && (stream <= 2 || driver.context_of(stream).is_some())
        })
}

macro_rules! pools {
    ($($allocate:ident $allocate_name:literal $from:ident $from_name:literal $free:ident $free_name:literal;)*) => {$(
        #[unsafe(no_mangle)]
        pub(super) unsafe extern "C" fn $allocate(to: *mut u64, bytes: usize, stream: u64) -> u32 {
            const NAME: &str = stringify!($allocate);
            let _pass = hook::enter(false);
            let own = || real!($allocate_name (*mut u64, usize, u64) (to, bytes, stream));
            allocated(to, bytes, stream_of(NAME, stream), is_of_thread_stream(NAME), |_| true, own)
        }

        #[unsafe(no_mangle)]
        pub(super) unsafe extern "C" fn $from(to: *mut u64, bytes: usize, pool: u64, stream: u64) -> u32 {
            const NAME: &str = stringify!($from);
            let _pass = hook::enter(false);
            let own = || real!($from_name (*mut u64, usize, u64, u64) (to, bytes, pool, stream));
            let is_of_device = |driver: &Real| driver.is_pool_of_device(pool);
            allocated(to, bytes, stream_of(NAME, stream), is_of_thread_stream(NAME), is_of_device, own)
        }

        #[unsafe(no_mangle)]
        pub(super) unsafe extern "C" fn $free(address: u64, stream: u64) -> u32 {
            const NAME: &str = stringify!($free);
            let _pass = hook::enter(true);
            if let Err(Failure(code)) = ready(is_of_thread_stream(NAME)) {
                return code;
            }
            let own = || real!($free_name (u64, u64) (address, stream));
            // Memory of no pool may be freed so, too.
            if is_virtual(address, stream_of(NAME, stream))
                && let Some(code) = free(address)
            {
                return code;
            }
            natively_freed(Id::Address(address), own)
        }
    )*};
}

pools! {
    cuMemAllocAsync c"cuMemAllocAsync" cuMemAllocFromPoolAsync c"cuMemAllocFromPoolAsync" cuMemFreeAsync c"cuMemFreeAsync";
    cuMemAllocAsync_ptsz c"cuMemAllocAsync_ptsz" cuMemAllocFromPoolAsync_ptsz c"cuMemAllocFromPoolAsync_ptsz" cuMemFreeAsync_ptsz c"cuMemFreeAsync_ptsz";
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn cuMemPoolCreate(pool: *mut u64, property: *const Property) -> u32 {
    let result = real!(c"cuMemPoolCreate" (*mut u64, *const Property) (pool, property));
    if result == 0 && hook::is_here() {
        // SAFETY: the driver has read it; a pool's properties begin as those of physical memory.
        let Property { kind, location, .. } = unsafe { property.read() };
        // SAFETY: the driver has written it.
        let pool = unsafe { *pool };
        if kind == PINNED && location.kind == ON_DEVICE {
            with(|manager| {
                manager.driver().pools.lock().unwrap_or_else(PoisonError::into_inner).insert(pool)
            });
        }
    }
    result
}

/// The pool that memory is of.
fn pool_of(address: u64) -> Option<u64> {
    /// `CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE`.
    const POOL: c_int = 17;
    let mut pool = 0u64;
    let found = real!(c"cuPointerGetAttribute" (*mut u64, c_int, u64) (&mut pool, POOL, address));
    (found == 0).then_some(pool)
}

/// What is allocated of it is there until it is freed.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn cuMemPoolDestroy(pool: u64) -> u32 {
    let _pass = hook::enter(true);
    if let Err(Failure(code)) = before() {
        return code;
    }
    let own = || real!(c"cuMemPoolDestroy"(u64)(pool));
    if !hook::is_here() {
        return own();
    }
    // One look at the manager: nobody may ask it meanwhile, and its handle may come again.
    with(|manager| {
        let of = manager.of_pools().filter(|address| pool_of(*address) == Some(pool)).collect();
        let result = own();
        let mut pools = manager.driver().pools.lock().unwrap_or_else(PoisonError::into_inner);
        let is_gone = result == 0 && pools.remove(&pool);
        drop(pools);
        if is_gone {
            manager.end_pool(of);
        }
        result
    })
}
