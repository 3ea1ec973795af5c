//! Keys and values of new tokens that are put into a cache, of one piece for each sequence or of pages.

use crate::call::{Buffer, Call, CallError, Entry, Function, Launch, Operand, Region};
use crate::family::Resources;
use crate::gather::blocks;
use crate::graph::{self, NoGraph};
use crate::pieces::{Pieces, THREADS};
use crate::strided::aligned;
use vm_graph::ValidGraph;
use vm_ir::builder::{BuildError, Builder, IRBlock, PlaceRef};
use vm_ir::op::{Axis, Cache};
use vm_ir::view::{Access, Dim, ViewType};
use vm_ir::{GuestAddr, Kernel, Scalar, Type};

/// A variant. Its parameters: `k` and `v`, `[batch, tokens, d]`; `k_cache` and `v_cache`, `[slots, tokens of a slot, d]`; `lengths`, i32, `[batch]`; of pages `pages`, i32, `[batch,
/// pages of a sequence]`. The grid: tokens along x, sequences along y, k and v along z.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Append {
    /// What is copied.
    pub element: Scalar,
    /// Tokens of a page; 0 if a slot is a sequence.
    pub page: u32,
    /// How a token's row is taken.
    pub pieces: Pieces,
}

impl Append {
    /// Its name, which tells it from all others.
    pub fn name(&self) -> String {
        format!("append_{}_{}_{}", self.element, self.page, self.pieces.suffix())
    }

    /// Its kernel.
    ///
    /// # Errors
    /// Pieces that there are not.
    pub fn kernel(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        let block = IRBlock::new(guest);
        self.write(block.builder());
        block.kernel()
    }

    fn write<'b>(self, k: Builder<'b>) {
        let Append { element, page, pieces } = self;
        k.name(&self.name()).block_size([THREADS, 1, 1]);
        let [key, value] = ["k", "v"].map(|name| pieces.view(k, name, element, 3, Access::Read));
        let caches = ["k_cache", "v_cache"].map(|name| {
            let tokens = if page > 0 { Dim::Fixed(page.into()) } else { Dim::ANY };
            let dims = [Dim::ANY, tokens, Dim::Any { multiple: pieces.lanes.into() }];
            let ty = ViewType::new(element, 3, Access::Write).with_dims(&dims).named(&["", "", "d"]);
            let align = element.bytes() * u32::from(pieces.lanes);
            k.view_of(name, if pieces.aligned { ty.aligned(align) } else { ty })
        });
        let lengths = k.view("lengths", Scalar::I32, 1, Access::Read);
        let pages = (page > 0).then(|| k.view("pages", Scalar::I32, 2, Access::Read));
        let (token, first) = pieces.place(k);
        let batch = k.block_id(Axis::Y).to(Scalar::I64);
        let copy = |from: PlaceRef<'b>, to: PlaceRef<'b>| {
            k.if_(batch.lt(from.extent(0)) & batch.lt(lengths.extent(0)) & token.lt(from.extent(1)), || {
                let position = lengths.at([batch]).load().to(Scalar::I64) + token;
                let (slot, at) = match pages {
                    None => (batch, position),
                    Some(pages) => {
                        let number = position / i64::from(page);
                        let there = position.ge(0) & number.lt(pages.extent(1)) & batch.lt(pages.extent(0));
                        let load = || pages.at([batch, number]).load().to(Scalar::I64);
                        (k.if_else(there, load, || k.i64(-1)), position % i64::from(page))
                    }
                };
                let inside = slot.ge(0) & slot.lt(to.extent(0)) & at.ge(0) & at.lt(to.extent(1));
                k.if_(inside, || {
                    pieces.each(k, first, from.extent(2), &|columns| {
                        let values: Vec<_> =
                            columns.iter().map(|column| pieces.load(from, [batch, token, *column])).collect();
                        for (column, value) in columns.iter().zip(values) {
                            to.at([slot, at, *column]).cached(Cache::Stream).store(value);
                        }
                    });
                });
            });
        };
        k.if_else(k.block_id(Axis::Z).eq(0), || copy(key, caches[0]), || copy(value, caches[1]));
    }
}

/// What a cache is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// A piece for each sequence: `[batch, capacity, heads, dim]`.
    Contiguous {
        /// Tokens that a sequence has room for.
        capacity: u64,
    },
    /// Pages, which sequences take by a table: `[pages, page, heads, dim]`.
    Paged {
        /// Pages.
        pages: u64,
        /// Tokens of a page.
        page: u32,
        /// Pages that a row of the table has.
        of_sequence: u64,
    },
}

/// Puts keys and values of new tokens into a cache: token i of sequence b becomes the one at position p = lengths\[b\] + i. In a cache of pages that is token p mod `page` of
/// page table\[b, p / `page`\]. What has no place there, or a page that is none, is left out. The lengths are the caller's to change.
///
/// Its buffers: `k` and `v`, `[batch, tokens, heads, dim]`; `k_cache` and `v_cache`; `lengths`, i32, `[batch]`, those of before; of pages `table`, i32, `[batch, of_sequence]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvAppend {
    /// Sequences.
    pub batch: u64,
    /// New tokens of each.
    pub tokens: u64,
    /// Heads.
    pub heads: u64,
    /// Elements of a head.
    pub dim: u64,
    /// What the cache is of.
    pub layout: Layout,
    /// What an element is: any type of memory.
    pub element: Scalar,
    /// Bytes to whose multiples k, v and the caches are aligned; 16 is fast.
    pub align: u32,
}

impl Function for KvAppend {
    fn buffers(&self) -> Vec<Buffer> {
        let KvAppend { batch, tokens, heads, dim, layout, element, .. } = *self;
        let [slots, room] = match layout {
            Layout::Contiguous { capacity } => [batch, capacity],
            Layout::Paged { pages, page, .. } => [pages, page.into()],
        };
        let new = |name| Buffer::new(name, element, &[batch, tokens, heads, dim], Access::Read);
        // What is not appended to stays.
        let cache = |name| Buffer::new(name, element, &[slots, room, heads, dim], Access::ReadWrite);
        let mut all = vec![new("k"), new("v"), cache("k_cache"), cache("v_cache")];
        all.push(Buffer::new("lengths", Scalar::I32, &[batch], Access::Read));
        if let Layout::Paged { of_sequence, .. } = layout {
            all.push(Buffer::new("table", Scalar::I32, &[batch, of_sequence], Access::Read));
        }
        all
    }

    fn graph(&self) -> Result<ValidGraph, NoGraph> {
        graph::cache::append(self)
    }

    fn call(&self, _: &Resources) -> Result<Call, CallError> {
        const NAME: &str = "kv_append";
        let KvAppend { batch, tokens, heads, dim, layout, element, align } = *self;
        let unsupported = |what: String| CallError::Unsupported { function: NAME, what };
        let page = match layout {
            Layout::Contiguous { .. } => 0,
            Layout::Paged { page: 0, .. } => {
                return Err(unsupported("pages of 0 tokens; they have at least 1".into()));
            }
            Layout::Paged { page, .. } => page,
        };
        let buffers = self.buffers();
        if buffers.iter().any(Buffer::is_empty) {
            return Ok(Call::default());
        }
        let columns = heads.checked_mul(dim);
        let columns =
            columns.ok_or_else(|| unsupported(format!("{heads} heads of {dim}; their product overflows")))?;
        if batch >= 1 << 31 {
            return Err(unsupported(format!("{batch} sequences; fewer than 2^31 are taken")));
        }
        let pieces = Pieces::of(element, columns, align);
        let operands = buffers.iter().enumerate().map(|(at, buffer)| {
            let whole = match buffer.extents[..] {
                [slots, tokens, _, _] => Operand::whole(at, element, &[slots, tokens, columns]),
                _ => Operand::whole(at, buffer.element, &buffer.extents),
            };
            // Pages are all sequences'.
            (whole, [(page == 0 || !buffer.name.ends_with("cache")).then_some(0), None])
        });
        let operands: Vec<_> = operands.collect();
        let entry = Entry::Append(Append { element, page, pieces });
        let tokens = blocks(NAME, tokens, pieces.rows())?;
        Ok(Call { launches: Launch::folded(entry, tokens, [batch, 2], &operands), workspace: 0 })
    }

    fn call_strided(&self, buffers: &[Buffer], resources: &Resources) -> Result<Call, CallError> {
        let align = aligned(self.align, &buffers[..4]);
        KvAppend { align, ..*self }.call(resources)
    }
}

/// Puts the keys and values of one product of queries, keys and values into a contiguous cache, as [`KvAppend`] does.
///
/// Its buffers: `qkv`, `[batch, tokens, heads + 2 · shared, dim]`: for each token its heads of queries, keys and values, one behind the other; `k_cache`
/// and `v_cache`, `[batch, capacity, shared, dim]`; `lengths`, i32, `[batch]`, those of before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QkvAppend {
    /// Sequences.
    pub batch: u64,
    /// New tokens of each.
    pub tokens: u64,
    /// Heads of queries, and of keys and values.
    pub heads: [u64; 2],
    /// Elements of a head.
    pub dim: u64,
    /// Tokens that a sequence has room for.
    pub capacity: u64,
    /// What an element is: any type of memory.
    pub element: Scalar,
    /// Bytes to whose multiples all buffers are aligned; 16 is fast.
    pub align: u32,
}

impl Function for QkvAppend {
    fn buffers(&self) -> Vec<Buffer> {
        let QkvAppend { batch, tokens, heads: [heads, shared], dim, capacity, element, .. } = *self;
        let all = heads.saturating_add(shared.saturating_mul(2));
        let cache = |name| Buffer::new(name, element, &[batch, capacity, shared, dim], Access::ReadWrite);
        vec![
            Buffer::new("qkv", element, &[batch, tokens, all, dim], Access::Read),
            cache("k_cache"),
            cache("v_cache"),
            Buffer::new("lengths", Scalar::I32, &[batch], Access::Read),
        ]
    }

    fn graph(&self) -> Result<ValidGraph, NoGraph> {
        graph::cache::append_of_product(self)
    }

    fn call(&self, resources: &Resources) -> Result<Call, CallError> {
        const NAME: &str = "qkv_append";
        let QkvAppend { batch, tokens, heads: [heads, shared], dim, capacity, element, align } = *self;
        let qkv = &self.buffers()[0];
        let token = qkv.extents[2].checked_mul(dim).filter(|_| qkv.len().is_some());
        let token = token.ok_or_else(|| CallError::Unsupported {
            function: NAME,
            what: format!(
                "{heads} and twice {shared} heads of {dim} for {tokens} tokens; the product overflows"
            ),
        })?;
        let layout = Layout::Contiguous { capacity };
        // Queries stand before the keys: with both, rows begin at multiples of what all of their heads have in common.
        let bytes = dim.saturating_mul(element.bytes().into());
        let align = if bytes.is_multiple_of(align.max(1).into()) { align } else { element.bytes() };
        let append = KvAppend { batch, tokens, heads: shared, dim, layout, element, align };
        let mut call = append.call(resources)?;
        for launch in &mut call.launches {
            for operand in &mut launch.operands {
                let Operand::Buffer(buffer, region) = operand else { continue };
                // K and V are parts of what was one product; the others stand one place before.
                let columns = shared * dim;
                let bytes = u64::from(element.bytes());
                let first = region.offset / (tokens * columns * bytes);
                let count = region.extents[0];
                let part = |number: u64| Region {
                    element,
                    offset: (first * tokens * token + heads * dim + number * columns) * bytes,
                    extents: vec![count, tokens, columns],
                    strides: vec![tokens * token, token, 1],
                };
                match *buffer {
                    0 => *region = part(0),
                    1 => *region = part(1),
                    _ => {}
                }
                *buffer = buffer.saturating_sub(1);
            }
        }
        Ok(call)
    }

    fn call_strided(&self, buffers: &[Buffer], resources: &Resources) -> Result<Call, CallError> {
        let align = aligned(self.align, &buffers[..3]);
        QkvAppend { align, ..*self }.call(resources)
    }
}

/// A kernel that adds to integers. Its parameters: `x`, i32, `[n]`; `by`, i32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Advance;

impl Advance {
    /// Its name, which tells it from all others.
    pub fn name(&self) -> String {
        "advance".into()
    }

    /// Its kernel.
    ///
    /// # Errors
    /// None.
    pub fn kernel(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        let block = IRBlock::new(guest);
        let k = block.builder();
        k.name(&self.name()).block_size([THREADS, 1, 1]);
        let x = k.view("x", Scalar::I32, 1, Access::ReadWrite);
        let by = k.scalar("by", Type::I32);
        let at = k.global_id(Axis::X);
        k.if_(at.lt(x.extent(0)), || x.at([at]).store(x.at([at]).load() + by));
        block.kernel()
    }
}

/// Adds a number to each length, once a cache has grown by as many tokens; what is greater than i32 wraps. Its buffer: `lengths`, i32, `[count]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdvanceLengths {
    /// Lengths.
    pub count: u64,
    /// What is added.
    pub by: i32,
}

impl Function for AdvanceLengths {
    fn buffers(&self) -> Vec<Buffer> {
        vec![Buffer::new("lengths", Scalar::I32, &[self.count], Access::ReadWrite)]
    }

    fn graph(&self) -> Result<ValidGraph, NoGraph> {
        graph::cache::advance(self)
    }

    fn call(&self, _: &Resources) -> Result<Call, CallError> {
        if self.count == 0 {
            return Ok(Call::default());
        }
        let grid = [blocks("advance", self.count, THREADS.into())?, 1, 1];
        let operands = vec![Operand::whole(0, Scalar::I32, &[self.count]), Operand::i32(self.by)];
        Ok(Call { launches: vec![Launch { entry: Entry::Advance(Advance), grid, operands }], workspace: 0 })
    }
}
