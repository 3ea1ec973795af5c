//! The kernel by which a device sums its side of a checked copy. [`vm_accel::crc32`] says what it has to do.
//!
//! A thread goes through words that lie a block's width apart, so that neighbours read neighbouring words. From one
//! to the next its remainder is multiplied by one and the same power of x: four tables in shared memory have the products, one
//! for each byte of the remainder. In the end each is multiplied by the power that is due to its place, and all are added.
#![allow(unsafe_code)]

use vm_accel::Checksum;
use vm_accel::crc32::{BLOCK_WORDS, BLOCKS, EDGES, ITEM_WORDS, ITEMS, POLYNOMIAL, multiply, power};
use vm_ir::builder::{Builder, PlaceRef, Val};
use vm_ir::op::Axis;
use vm_ir::view::{Access, Dim, ViewType};
use vm_ir::{GuestAddr, IRBlock, Kernel, Scalar, Type};

use super::{CompileError, JitCompiler, JitTarget};

/// Entries of a table: one for each value of a byte.
const ENTRIES: i32 = 256;
/// Bytes of a word, at most as many of which lie before the first and behind the last.
const EDGE: u32 = EDGES / 2;

impl<A: JitTarget> JitCompiler<A> {
    /// What [`WorkerOptions::checksum`](super::WorkerOptions) wants, with its usual limits: copies between the host and the device
    /// are then checked at both ends.
    ///
    /// # Errors
    /// As [`compile`](Self::compile).
    pub fn checksum(&self) -> Result<Checksum, CompileError> {
        // SAFETY: the kernel keeps to its views and its arrays, whatever they are: each index is compared with an
        // extent, masked to a table, or a constant below it. Its loops have constant bounds.
        let compiler = unsafe { self.clone().trusted() };
        Ok(Checksum::new(compiler.compile_kernel(kernel()?)?.artifact().clone()))
    }
}

/// The kernel.
///
/// # Errors
/// None: it can be written.
pub(super) fn kernel() -> Result<Kernel, CompileError> {
    let block = IRBlock::new(GuestAddr(0));
    let k = block.builder();
    k.name("crc32").block_size([ITEMS, 1, 1]);
    let words = k.view("words", Scalar::I32, 1, Access::Read);
    let head = k.view("head", Scalar::I8, 1, Access::Read);
    let tail = k.view("tail", Scalar::I8, 1, Access::Read);
    let size = Dim::Fixed(u64::from(ITEMS + BLOCKS));
    let powers = k.view_of("powers", ViewType::new(Scalar::I32, 1, Access::Read).with_dims(&[size]));
    let sums = k.view("sums", Scalar::I32, 1, Access::Write);
    let tables = k.shared("tables", Scalar::I32, &[4 * ENTRIES as u32]);
    let parts = k.shared("parts", Scalar::I32, &[ITEMS / 32]);

    let item = k.thread_id(Axis::X);
    fill(k, tables, item);
    k.barrier();

    let (number, blocks) = (k.block_id(Axis::X).to(Scalar::I64), k.grid_dim(Axis::X).to(Scalar::I64));
    // The words end where the last block does, as zeros before the first of them change nothing.
    let count = words.extent(0);
    let from = count - (blocks - number) * i64::from(BLOCK_WORDS);
    let first = from + item.to(Scalar::I64);
    let at = |index: u32| first + i64::from(index * ITEMS);
    let remainder = k.if_else(
        from.ge(0i64),
        || {
            let all: Vec<_> = (0..ITEM_WORDS).map(|index| words.at([at(index)]).load()).collect();
            all.into_iter().reduce(|remainder, word| next(tables, remainder) ^ word).unwrap_or(k.i32(0))
        },
        || {
            (0..ITEM_WORDS).fold(k.i32(0), |remainder, index| {
                let word = k.if_else(at(index).ge(0i64), || words.at([at(index)]).load(), || k.i32(0));
                next(tables, remainder) ^ word
            })
        },
    );
    let of_warp = product(k, remainder, powers.at([item]).load()).warp_xor();
    k.if_(k.lane_id().eq(0), || parts.at([k.warp_id()]).store(of_warp));
    k.barrier();

    k.if_(item.eq(0), || {
        let all = (0..ITEMS as i32 / 32).map(|warp| parts.at([k.i32(warp)]).load());
        let of_block = all.reduce(|a, b| a ^ b).unwrap_or(k.i32(0));
        // A block before these has no words.
        let behind = (blocks - number - 1i64).min_u(i64::from(BLOCKS - 1));
        let power = powers.at([behind + i64::from(ITEMS)]).load();
        k.if_(number.lt_u(sums.extent(0)), || sums.at([number]).store(product(k, of_block, power)));
        k.if_(number.eq(0i64), || {
            edge(k, head, sums, blocks);
            edge(k, tail, sums, blocks + i64::from(EDGE));
        });
    });
    Ok(block.kernel()?)
}

/// Fills the tables, an entry of each by each thread: what a byte of a remainder becomes.
fn fill<'b>(k: Builder<'b>, tables: PlaceRef<'b>, item: Val<'b>) {
    let stride = power(32 * u64::from(ITEMS));
    for byte in 0..4 {
        let bits = (0..8).map(|bit| {
            let one = constant(k, multiply(1 << (8 * byte + bit), stride));
            (item << k.i32(31 - bit) >> k.i32(31)) & one
        });
        let entry = bits.reduce(|a, b| a ^ b).unwrap_or(k.i32(0));
        tables.at([item + k.i32(byte * ENTRIES)]).store(entry);
    }
}

/// A remainder times x to the bits between two words of a thread.
fn next<'b>(tables: PlaceRef<'b>, remainder: Val<'b>) -> Val<'b> {
    let k = remainder.builder();
    let of = |byte: i32| {
        let index = remainder.shr_u(k.i32(8 * byte)) & k.i32(ENTRIES - 1);
        tables.at([index + k.i32(byte * ENTRIES)]).load()
    };
    of(0) ^ of(1) ^ of(2) ^ of(3)
}

/// The product of two remainders, as [`multiply`] has it.
fn product<'b>(k: Builder<'b>, a: Val<'b>, b: Val<'b>) -> Val<'b> {
    let polynomial = constant(k, POLYNOMIAL);
    let (sum, _) = (0..32).fold((k.i32(0), b), |(sum, b), bit| {
        let sum = sum ^ ((a << k.i32(bit) >> k.i32(31)) & b);
        let carry = (b << k.i32(31) >> k.i32(31)) & polynomial;
        (sum, b.shr_u(1) ^ carry)
    });
    sum
}

/// Writes the bytes before or behind the words.
fn edge<'b>(k: Builder<'b>, bytes: PlaceRef<'b>, sums: PlaceRef<'b>, place: Val<'b>) {
    for index in 0..i64::from(EDGE) {
        let at = k.i64(index);
        let read = || bytes.at([at]).load().to_u(Scalar::I32);
        let byte = k.if_else(at.lt(bytes.extent(0)), read, || k.i32(0));
        let place = place + index;
        k.if_(place.lt_u(sums.extent(0)), || sums.at([place]).store(byte));
    }
}

fn constant(k: Builder<'_>, bits: u32) -> Val<'_> {
    k.bits(Type::I32, bits.into())
}

#[cfg(all(test, feature = "cpu"))]
mod tests;
