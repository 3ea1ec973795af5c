//! What a session holds of devices' memory, and that it is no more than its [`Pot`] has.
//!
//! | by | counts |
//! | --- | --- |
//! | `cuMemAlloc`, `cuMemAllocPitch` | the blocks of 2 MiB in which an allocation is, each once, as the driver takes them from the device |
//! | pools | what the driver says that each reserves; once it is destroyed, what was allocated of it and is not freed |
//! | `cuMemCreate` | until it has neither a handle nor a mapping |
//! | arrays | rows of 512 bytes, 128 of them, in blocks of 2 MiB: no less than the driver takes; with mipmaps twice that |
//! | modules, libraries | the image, and what more is missing of the device once it is loaded |
//! | `cuCtxSetLimit` | the heap, the buffer of `printf`, stacks of all threads that the device can have |

use std::collections::BTreeMap;
use std::sync::{LazyLock, Mutex};

use rustc_hash::FxHashMap;
use vm_cuda_api::{FUNCTIONS, Object, names::base};

use super::pot::Pot;
use super::reach::Checked;
use super::session::{Session, locked};
use super::sys::{Driver, Word};
use crate::wire::code;

/// What the driver takes of a device at once.
const BLOCK: u64 = 2 << 20;
/// What may be missing of a device beside a module's image without another look.
const SLACK: u64 = 32 << 20;

/// What a call does to what is held.
#[derive(Clone, Copy, Debug)]
enum Rule {
    Allocate,
    Pitch,
    Pooled,
    Free,
    FreeAsync,
    Create,
    Retain,
    Release,
    Map,
    Unmap,
    Array(usize),
    Drop(Object),
    DropPool,
    DropContext,
    RetainPrimary,
    DropPrimary,
    ResetPrimary,
    Limit,
    Info,
    Total,
    Waits,
}

const RULES: [(&str, Rule); 31] = [
    ("cuMemAlloc_v2", Rule::Allocate),
    ("cuMemAllocPitch_v2", Rule::Pitch),
    ("cuMemAllocAsync", Rule::Pooled),
    ("cuMemAllocFromPoolAsync", Rule::Pooled),
    ("cuMemFree_v2", Rule::Free),
    ("cuMemFreeAsync", Rule::FreeAsync),
    ("cuMemCreate", Rule::Create),
    ("cuMemRetainAllocationHandle", Rule::Retain),
    ("cuMemRelease", Rule::Release),
    ("cuMemMap", Rule::Map),
    ("cuMemUnmap", Rule::Unmap),
    ("cuArrayCreate_v2", Rule::Array(2)),
    ("cuArray3DCreate_v2", Rule::Array(3)),
    ("cuMipmappedArrayCreate", Rule::Array(4)),
    ("cuArrayDestroy", Rule::Drop(Object::Array)),
    ("cuMipmappedArrayDestroy", Rule::Drop(Object::Mipmap)),
    ("cuModuleUnload", Rule::Drop(Object::Module)),
    ("cuLibraryUnload", Rule::Drop(Object::Library)),
    ("cuMemPoolDestroy", Rule::DropPool),
    ("cuCtxDestroy_v2", Rule::DropContext),
    ("cuDevicePrimaryCtxRetain", Rule::RetainPrimary),
    ("cuDevicePrimaryCtxRelease", Rule::DropPrimary),
    ("cuDevicePrimaryCtxRelease_v2", Rule::DropPrimary),
    ("cuDevicePrimaryCtxReset", Rule::ResetPrimary),
    ("cuDevicePrimaryCtxReset_v2", Rule::ResetPrimary),
    ("cuCtxSetLimit", Rule::Limit),
    ("cuMemGetInfo_v2", Rule::Info),
    ("cuDeviceTotalMem_v2", Rule::Total),
    ("cuStreamSynchronize", Rule::Waits),
    ("cuCtxSynchronize", Rule::Waits),
    ("cuMemPoolTrimTo", Rule::Waits),
];

static BY_NUMBER: LazyLock<Vec<Option<Rule>>> = LazyLock::new(|| {
    let rule = |name: &str| RULES.iter().find(|(of, _)| *of == name || *of == base(name));
    FUNCTIONS.iter().map(|function| rule(&function.name).map(|(_, rule)| *rule)).collect()
});

/// A call and its memory.
struct Made<'a> {
    driver: &'a Driver,
    call: Checked<'a>,
    memory: &'a mut [u64],
}

impl Made<'_> {
    fn make(&mut self) -> u32 {
        self.driver.make(self.call, self.memory)
    }

    /// A parameter, or what is at its place.
    fn value(&self, at: usize) -> u64 {
        match self.call.words().get(at) {
            Some(Word::Is(value)) => *value,
            Some(Word::At(at)) => self.memory.get(*at).copied().unwrap_or(0),
            None => 0,
        }
    }

    /// Words behind a parameter that points to them.
    fn behind(&self, at: usize) -> &[u64] {
        match self.call.words().get(at) {
            Some(Word::At(at)) => self.memory.get(*at..).unwrap_or(&[]),
            _ => &[],
        }
    }

    fn set(&mut self, at: usize, to: impl FnOnce(u64) -> u64) {
        if let Some(Word::At(at)) = self.call.words().get(at)
            && let Some(word) = self.memory.get_mut(*at)
        {
            *word = to(*word);
        }
    }
}

#[derive(Debug, Default)]
struct Physical {
    bytes: u64,
    handles: u64,
    mappings: u64,
}

/// What is held, by what it is called.
#[derive(Debug, Default)]
struct Held {
    /// How many allocations are in a block.
    blocks: FxHashMap<u64, u32>,
    /// Allocations: length and context.
    allocations: BTreeMap<u64, (u64, u64)>,
    /// What contexts have: bytes and context. The second word is a handle, or a limit.
    objects: FxHashMap<(Option<Object>, u64), (u64, u64)>,
    physical: FxHashMap<u64, Physical>,
    /// Physical memory that is exported as files.
    exported: FxHashMap<[u64; 2], u64>,
    /// Mappings: length and handle.
    mappings: BTreeMap<u64, (u64, u64)>,
    /// What pools reserve.
    pools: BTreeMap<u64, u64>,
    /// What was allocated of pools: length and pool, 0 of one that is destroyed.
    pooled: BTreeMap<u64, (u64, u64)>,
    primaries: BTreeMap<u64, u64>,
}

/// The quota of a session.
#[derive(Debug, Default)]
pub(super) struct Quota {
    pot: Option<Pot>,
    held: Mutex<Held>,
}

impl Quota {
    pub(super) fn new(pot: Option<Pot>) -> Self {
        Self { pot, held: Mutex::default() }
    }

    /// Makes a call that the table unpacked, and counts what it does.
    pub(super) fn make(&self, driver: &Driver, call: Checked<'_>, memory: &mut [u64]) -> u32 {
        let mut made = Made { driver, call, memory };
        match (&self.pot, BY_NUMBER[call.number()]) {
            (Some(_), Some(Rule::Waits)) => {
                // It may take as long as the device does: nothing is locked meanwhile.
                let result = made.make();
                self.refresh(driver);
                result
            }
            (Some(pot), Some(Rule::Free | Rule::FreeAsync)) => {
                let at = made.value(0);
                let result = made.make();
                if result == 0 {
                    locked(&self.held).free(pot, at);
                    self.refresh(driver);
                }
                result
            }
            (Some(pot), Some(rule)) => locked(&self.held).apply(pot, rule, &mut made),
            _ => made.make(),
        }
    }

    /// Memory was exported as a file: it counts until all have closed that.
    pub(super) fn export(&self, token: [u64; 2], handle: u64) {
        let held = &mut *locked(&self.held);
        if let Some(memory) = held.physical.get_mut(&handle) {
            memory.handles += 1;
            held.exported.insert(token, handle);
        }
    }

    /// Those files are closed.
    pub(super) fn forget(&self, token: [u64; 2]) {
        let held = &mut *locked(&self.held);
        if let (Some(pot), Some(handle)) = (&self.pot, held.exported.remove(&token)) {
            held.settle(pot, handle, |memory| memory.handles = memory.handles.saturating_sub(1));
        }
    }

    /// How much physical memory is.
    pub(super) fn bytes(&self, handle: u64) -> u64 {
        locked(&self.held).physical.get(&handle).map_or(0, |memory| memory.bytes)
    }

    /// Opens memory of another program, so much: it counts here too.
    pub(super) fn import(
        &self,
        driver: &Driver,
        bytes: u64,
        open: impl FnOnce() -> (u32, u64),
    ) -> (u32, u64) {
        let Some(pot) = &self.pot else { return open() };
        let held = &mut *locked(&self.held);
        if !held.take(pot, driver, bytes) {
            return (code::OUT_OF_MEMORY, 0);
        }
        let (result, handle) = open();
        match held.physical.get_mut(&handle) {
            _ if result != 0 => pot.give(bytes),
            Some(memory) => {
                memory.handles += 1;
                pot.give(bytes);
            }
            None => {
                held.physical.insert(handle, Physical { bytes, handles: 1, mappings: 0 });
            }
        }
        (result, handle)
    }

    /// Is there one?
    pub(super) fn is_limited(&self) -> bool {
        self.pot.is_some()
    }

    /// How much more all may hold.
    pub(super) fn left(&self) -> u64 {
        self.pot.as_ref().map_or(u64::MAX, Pot::left)
    }

    fn refresh(&self, driver: &Driver) {
        if let Some(pot) = &self.pot {
            locked(&self.held).refresh(pot, driver);
        }
    }

    /// Loads an image, and gives what it became of it.
    pub(super) fn load(
        &self,
        session: &Session,
        object: Object,
        len: u64,
        mut load: impl FnMut() -> Result<u64, u32>,
    ) -> Result<u64, u32> {
        let Some(pot) = &self.pot else { return load() };
        let driver = session.driver();
        let mut held = locked(&self.held);
        if !held.take(pot, driver, len) {
            return Err(code::OUT_OF_MEMORY);
        }
        let mut missing = u64::MAX;
        // Others take memory meanwhile, too: what is missing for long is looked at again.
        for attempt in 0..3 {
            let before = free(driver);
            let loaded = load().inspect_err(|_| pot.give(len))?;
            missing = missing.min(before.saturating_sub(free(driver)).saturating_sub(len));
            let is_last = missing <= SLACK || attempt == 2;
            if is_last && pot.take(missing) {
                held.objects.insert((Some(object), loaded), (len + missing, current(driver)));
                return Ok(loaded);
            }
            let name = if object == Object::Library { "cuLibraryUnload" } else { "cuModuleUnload" };
            driver.named(name, &[Word::Is(loaded)], &mut []);
            if is_last {
                break;
            }
        }
        pot.give(len);
        Err(code::OUT_OF_MEMORY)
    }
}

/// What is free on the device of the current context.
fn free(driver: &Driver) -> u64 {
    let mut memory = [0; 2];
    driver.named("cuMemGetInfo_v2", &[Word::At(0), Word::At(1)], &mut memory);
    memory[0]
}

/// The current context.
fn current(driver: &Driver) -> u64 {
    let mut memory = [0];
    driver.named("cuCtxGetCurrent", &[Word::At(0)], &mut memory);
    memory[0]
}

/// No less than what the driver takes for an array.
fn array(descriptor: &[u64], form: usize) -> u64 {
    let sides = if form == 2 { 2 } else { 3 };
    let &[width, height, ..] = descriptor else { return u64::MAX };
    let depth = if sides == 3 { descriptor.get(2).copied().unwrap_or(u64::MAX) } else { 1 };
    let Some(kind) = descriptor.get(sides) else { return u64::MAX };
    let channel = match *kind as u32 {
        1 | 8 => 1,
        2 | 9 | 0x10 => 2,
        3 | 0xa | 0x20 => 4,
        // Those of pictures, and of blocks: the widest there is.
        _ => 16,
    };
    let row = width
        .checked_mul(channel * (kind >> 32).clamp(1, 4))
        .and_then(|row| row.checked_next_multiple_of(512));
    let rows = height.max(1).checked_next_multiple_of(128);
    let levels = if form == 4 { 2 } else { 1 };
    let all = row
        .zip(rows)
        .and_then(|(row, rows)| row.checked_mul(rows)?.checked_mul(depth.max(1))?.checked_mul(levels));
    all.and_then(|all| all.checked_next_multiple_of(BLOCK)).unwrap_or(u64::MAX)
}

/// All bytes that stacks of so many may take.
fn stacks(driver: &Driver, bytes: u64) -> u64 {
    /// `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT` and `_MAX_THREADS_PER_MULTIPROCESSOR`.
    const ATTRIBUTES: [u64; 2] = [16, 39];
    let mut memory = [0; 2];
    driver.named("cuCtxGetDevice", &[Word::At(0)], &mut memory);
    let device = memory[0] & 0xffff_ffff;
    ATTRIBUTES.into_iter().fold(bytes, |all, attribute| {
        let mut memory = [0];
        let words = [Word::At(0), Word::Is(attribute), Word::Is(device)];
        driver.named("cuDeviceGetAttribute", &words, &mut memory);
        all.saturating_mul((memory[0] & 0xffff_ffff).max(1))
    })
}

impl Held {
    /// Takes so much, of what pools keep of freed memory where nothing else is left.
    fn take(&mut self, pot: &Pot, driver: &Driver, bytes: u64) -> bool {
        pot.take(bytes) || {
            for pool in self.pools.keys() {
                driver.named("cuMemPoolTrimTo", &[Word::Is(*pool), Word::Is(0)], &mut []);
            }
            self.refresh(pot, driver);
            pot.take(bytes)
        }
    }

    /// Makes a call with what it takes, which it gives back where it fails.
    fn with(&mut self, pot: &Pot, bytes: u64, made: &mut Made<'_>) -> u32 {
        if !self.take(pot, made.driver, bytes) {
            return code::OUT_OF_MEMORY;
        }
        let result = made.make();
        if result != 0 {
            pot.give(bytes);
        }
        result
    }

    fn apply(&mut self, pot: &Pot, rule: Rule, made: &mut Made<'_>) -> u32 {
        match rule {
            Rule::Allocate => self.allocate(pot, made, made.value(1), |made| made.value(1)),
            Rule::Pitch => {
                let height = made.value(3);
                let least = made.value(2).saturating_mul(height);
                self.allocate(pot, made, least, |made| made.value(1).saturating_mul(height))
            }
            Rule::Pooled => self.allocate_pooled(pot, made),
            Rule::Create => {
                let bytes = made.value(1);
                let result = self.with(pot, bytes, made);
                if result == 0 {
                    self.physical.insert(made.value(0), Physical { bytes, handles: 1, mappings: 0 });
                }
                result
            }
            Rule::Array(form) => {
                let bytes = array(made.behind(1), form);
                let result = self.with(pot, bytes, made);
                if result == 0 {
                    let object = if form == 4 { Object::Mipmap } else { Object::Array };
                    self.objects.insert((Some(object), made.value(0)), (bytes, current(made.driver)));
                }
                result
            }
            Rule::Limit => {
                let (limit, value) = (made.value(0), made.value(1));
                let bytes = match limit {
                    0 => stacks(made.driver, value),
                    1 | 2 => value,
                    _ => 0,
                };
                // One for each context: their handles are apart by more than the limits' numbers.
                let context = current(made.driver);
                let result = self.with(pot, bytes, made);
                if result == 0
                    && let Some((before, _)) = self.objects.insert((None, context ^ limit), (bytes, context))
                {
                    pot.give(before);
                }
                result
            }
            rule => {
                let key = made.value(0);
                let result = made.make();
                if result == 0 {
                    self.learn(pot, rule, key, made);
                }
                result
            }
        }
    }

    /// Learns from a call that takes nothing and has succeeded; its first parameter was this.
    fn learn(&mut self, pot: &Pot, rule: Rule, key: u64, made: &mut Made<'_>) {
        match rule {
            Rule::Retain => {
                if let Some(memory) = self.physical.get_mut(&made.value(0)) {
                    memory.handles += 1;
                }
            }
            Rule::Release => {
                self.settle(pot, key, |memory| memory.handles = memory.handles.saturating_sub(1))
            }
            Rule::Map => {
                let handle = made.value(3);
                self.mappings.insert(key, (made.value(1), handle));
                self.settle(pot, handle, |memory| memory.mappings += 1);
            }
            Rule::Unmap => {
                let end = key.saturating_add(made.value(1));
                let gone: Vec<_> =
                    self.mappings.range(key..end).map(|(at, (_, handle))| (*at, *handle)).collect();
                for (at, handle) in gone {
                    self.mappings.remove(&at);
                    self.settle(pot, handle, |memory| memory.mappings = memory.mappings.saturating_sub(1));
                }
            }
            Rule::Drop(object) => {
                if let Some((bytes, _)) = self.objects.remove(&(Some(object), key)) {
                    pot.give(bytes);
                }
            }
            Rule::DropPool => {
                let mut left = 0;
                for (len, pool) in self.pooled.values_mut().filter(|(_, pool)| *pool == key) {
                    *pool = 0;
                    left += *len;
                }
                pot.owe(left);
                pot.give(self.pools.remove(&key).unwrap_or(0));
            }
            Rule::DropContext => self.drop_context(pot, key),
            Rule::RetainPrimary => {
                self.primaries.insert(made.value(1), made.value(0));
            }
            Rule::DropPrimary if made.driver.has_primary(key) == Ok(false) => {
                self.drop_primary(pot, made.driver, key);
            }
            Rule::ResetPrimary => self.drop_primary(pot, made.driver, key),
            Rule::Info => {
                self.refresh(pot, made.driver);
                made.set(0, |free| free.min(pot.left()));
                made.set(1, |total| total.min(pot.limit()));
            }
            Rule::Total => made.set(0, |total| total.min(pot.limit())),
            _ => {}
        }
    }

    /// An allocation of no less than `least`, which is as long as the call tells.
    fn allocate(
        &mut self,
        pot: &Pot,
        made: &mut Made<'_>,
        least: u64,
        len: impl Fn(&Made<'_>) -> u64,
    ) -> u32 {
        let result = self.with(pot, least, made);
        if result != 0 {
            return result;
        }
        let (at, len) = (made.value(0), len(made));
        self.allocations.insert(at, (len, current(made.driver)));
        let mut new = 0;
        for block in blocks(at, len) {
            let count = self.blocks.entry(block).or_default();
            new += u64::from(*count == 0) * BLOCK;
            *count += 1;
        }
        // What it shares a block with has been counted.
        let more = new.saturating_sub(least);
        if pot.take(more) {
            pot.give(least.saturating_sub(new));
            return 0;
        }
        pot.owe(more);
        pot.give(least.saturating_sub(new));
        if made.driver.named("cuMemFree_v2", &[Word::Is(at)], &mut []) == 0 {
            self.free(pot, at);
        }
        made.set(0, |_| 0);
        code::OUT_OF_MEMORY
    }

    fn allocate_pooled(&mut self, pot: &Pot, made: &mut Made<'_>) -> u32 {
        /// `CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE`.
        const POOL: u64 = 17;
        let count = made.call.words().len();
        let (len, has_pool) = (made.value(1), count == 4);
        let stream = made.value(count - 1);
        let mut memory = [0];
        let words = [Word::Is(stream), Word::At(0)];
        let asked = made.driver.named("cuStreamIsCapturing", &words, &mut memory);
        if asked != 0 || memory[0] & 0xffff_ffff != 0 {
            // What nodes of a graph allocate is the driver's to keep, and is not told.
            return if asked == 0 { code::NOT_SUPPORTED } else { asked };
        }
        if !self.take(pot, made.driver, len) {
            return code::OUT_OF_MEMORY;
        }
        let result = made.make();
        pot.give(len);
        if result != 0 {
            return result;
        }
        let at = made.value(0);
        let pool = if has_pool { made.value(2) } else { pool_of(made.driver, at, POOL) };
        self.pooled.insert(at, (len, pool));
        self.pools.entry(pool).or_default();
        self.refresh(pot, made.driver);
        if pot.is_over() {
            let words = [Word::Is(at), Word::Is(stream)];
            if made.driver.named("cuMemFreeAsync", &words, &mut []) == 0 {
                self.pooled.remove(&at);
            }
            made.set(0, |_| 0);
            return code::OUT_OF_MEMORY;
        }
        0
    }

    /// Asks what pools reserve.
    fn refresh(&mut self, pot: &Pot, driver: &Driver) {
        for (pool, reserved) in &mut self.pools {
            let now = reserve(driver, *pool).unwrap_or(*reserved);
            pot.owe(now.saturating_sub(*reserved));
            pot.give(reserved.saturating_sub(now));
            *reserved = now;
        }
    }

    /// An address is free.
    fn free(&mut self, pot: &Pot, at: u64) {
        if let Some((len, _)) = self.allocations.remove(&at) {
            for block in blocks(at, len) {
                if let Some(count) = self.blocks.get_mut(&block) {
                    *count -= 1;
                    if *count == 0 {
                        self.blocks.remove(&block);
                        pot.give(BLOCK);
                    }
                }
            }
        }
        if let Some((len, 0)) = self.pooled.remove(&at) {
            pot.give(len);
        }
    }

    fn settle(&mut self, pot: &Pot, handle: u64, change: impl FnOnce(&mut Physical)) {
        let Some(memory) = self.physical.get_mut(&handle) else { return };
        change(memory);
        if memory.handles == 0 && memory.mappings == 0 {
            pot.give(memory.bytes);
            self.physical.remove(&handle);
        }
    }

    /// All that is in the primary context of a device is gone.
    fn drop_primary(&mut self, pot: &Pot, driver: &Driver, device: u64) {
        if let Some(context) = self.primaries.get(&device).copied() {
            self.drop_context(pot, context);
        }
        self.refresh(pot, driver);
    }

    /// A context is gone, with all that is in it.
    fn drop_context(&mut self, pot: &Pot, context: u64) {
        let gone: Vec<u64> =
            self.allocations.iter().filter(|(_, (_, of))| *of == context).map(|(at, _)| *at).collect();
        gone.into_iter().for_each(|at| self.free(pot, at));
        self.objects.retain(|_, (bytes, of)| {
            let stays = *of != context;
            if !stays {
                pot.give(*bytes);
            }
            stays
        });
    }
}

fn blocks(at: u64, len: u64) -> std::ops::Range<u64> {
    at / BLOCK..at.saturating_add(len).div_ceil(BLOCK)
}

/// The pool of an allocation.
fn pool_of(driver: &Driver, at: u64, attribute: u64) -> u64 {
    let mut memory = [0];
    let words = [Word::At(0), Word::Is(attribute), Word::Is(at)];
    driver.named("cuPointerGetAttribute", &words, &mut memory);
    memory[0]
}

/// What a pool has of its device.
fn reserve(driver: &Driver, pool: u64) -> Option<u64> {
    /// `CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT`.
    const RESERVED: u64 = 5;
    let mut memory = [0];
    let words = [Word::Is(pool), Word::Is(RESERVED), Word::At(0)];
    (driver.named("cuMemPoolGetAttribute", &words, &mut memory) == 0).then_some(memory[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_array_counts_no_less_than_its_elements() {
        let float = 0x20 | 1 << 32;
        let check =
            |descriptor: &[u64], form, expect| assert_eq!(array(descriptor, form), expect, "{descriptor:?}");
        check(&[1, 0, float], 2, BLOCK);
        check(&[1024, 1024, float], 2, 2 * BLOCK);
        check(&[1024, 1024, float], 3, u64::MAX);
        check(&[1024, 1024, 2, 0x20 | 4 << 32], 3, 16 * BLOCK);
        check(&[1024, 1024, 2, 0x20 | 4 << 32], 4, 32 * BLOCK);
        check(&[u64::MAX, 2, float], 2, u64::MAX);
        check(&[1 << 40, 1 << 40, float], 2, u64::MAX);
    }
}
