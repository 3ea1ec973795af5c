//! Rotary position embedding of queries and keys in place, and its gradient, which turns back.

use crate::call::{Buffer, Call, CallError, Entry, Function, Launch, Operand};
use crate::family::Resources;
use crate::flat::floats;
use crate::gather::blocks;
use crate::graph::{self, NoGraph};
use crate::strided::aligned;
use vm_graph::ValidGraph;
use vm_ir::builder::{BuildError, Builder, IRBlock, PlaceRef, Val};
use vm_ir::limits::MAX_GRID_YZ;
use vm_ir::op::{Axis, Cache};
use vm_ir::view::{Access, Dim, ViewType};
use vm_ir::{GuestAddr, Kernel, Scalar, Type};

/// Threads of a block.
const THREADS: u32 = 256;
/// Heads for which a thread computes a sine once, and which it loads before it stores.
const HEADS: i64 = 4;

/// Which elements of a head are a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pairs {
    /// i and i + dim / 2, as in GPT-NeoX and Llama.
    Halves,
    /// 2 i and 2 i + 1, as in RoFormer and GPT-J.
    Interleaved,
}

/// Where angles come from. A half is `dim / 2`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Angles {
    /// `cos` and `sin`, f32, `[rows, half]`, by position.
    CosSin,
    /// `angles`, f32, `[rows, half]`, by position.
    Table,
    /// `frequencies`, f32, `[half]`: an angle is the position times that.
    Frequencies,
}

/// A variant. Its parameters: `q`, `[batch, tokens, heads, dim]`; `k`, likewise of its own heads; the angles' views; `positions`, i32, `[batch, tokens]`, or the
/// first position, i64. The grid: tokens along x; four heads of q each, then of k, along y; the batch along z.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rotate {
    /// What a query and a key hold.
    pub element: Scalar,
    /// Elements of a head, even.
    pub dim: u32,
    /// Which of them are a pair.
    pub pairs: Pairs,
    /// Where angles come from.
    pub angles: Angles,
    /// Are positions in memory?
    pub positions: bool,
    /// Does it turn back?
    pub inverse: bool,
    /// Pairs of a thread, of which a head has a multiple.
    pub lanes: u8,
}

impl Rotate {
    /// Its name, which tells it from all others.
    pub fn name(&self) -> String {
        let Rotate { element, dim, lanes, .. } = self;
        let pairs = if self.pairs == Pairs::Halves { "" } else { "_interleaved" };
        let angles = match self.angles {
            Angles::CosSin => "cos_sin",
            Angles::Table => "table",
            Angles::Frequencies => "frequencies",
        };
        let positions = if self.positions { "_positions" } else { "" };
        let inverse = if self.inverse { "_back" } else { "" };
        format!("rope_{element}_{dim}_{angles}{pairs}{positions}{inverse}_{lanes}")
    }

    /// Threads for a token's pairs of a head.
    fn of_token(self) -> u32 {
        (self.dim / 2 / u32::from(self.lanes)).max(1)
    }

    /// Tokens of a block.
    pub(crate) fn tokens(self) -> u32 {
        (THREADS / self.of_token()).max(1)
    }

    /// Its kernel.
    ///
    /// # Errors
    /// Lanes that there are not.
    pub fn kernel(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        let block = IRBlock::new(guest);
        self.write(block.builder());
        block.kernel()
    }

    fn write<'b>(self, k: Builder<'b>) {
        let half = self.dim / 2;
        k.name(&self.name()).block_size([THREADS, 1, 1]);
        let heads = |name| {
            let dims = [Dim::ANY, Dim::ANY, Dim::ANY, Dim::Fixed(self.dim.into())];
            let ty = ViewType::new(self.element, 4, Access::ReadWrite).with_dims(&dims).named(&["b", "s"]);
            // Interleaved pairs are loaded as one vector.
            let wide = if self.pairs == Pairs::Halves { 1 } else { 2 };
            let bytes = self.element.bytes() * u32::from(self.lanes) * wide;
            k.view_of(name, if self.lanes > 1 { ty.aligned(bytes) } else { ty })
        };
        let (q, key) = (heads("q"), heads("k"));
        let row = Dim::Fixed(half.into());
        let table = |name| {
            k.view_of(
                name,
                ViewType::new(Scalar::F32, 2, Access::Read).with_dims(&[Dim::ANY, row]).named(&["r"]),
            )
        };
        let tables = match self.angles {
            Angles::CosSin => vec![table("cos"), table("sin")],
            Angles::Table => vec![table("angles")],
            Angles::Frequencies => {
                let ty = ViewType::new(Scalar::F32, 1, Access::Read).with_dims(&[row]);
                vec![k.view_of("frequencies", ty)]
            }
        };
        let positions = self
            .positions
            .then(|| k.view_of("positions", ViewType::new(Scalar::I32, 2, Access::Read).named(&["b", "s"])));
        let first = (!self.positions).then(|| k.scalar_in("first", Type::I64, 0, 1 << 40));
        let (thread, batch) = (k.thread_id(Axis::X), k.block_id(Axis::Z).to(Scalar::I64));
        let (of_token, tokens) = (self.of_token() as i32, self.tokens() as i32);
        let token =
            k.block_id(Axis::X).to(Scalar::I64) * i64::from(tokens) + thread.div_u(of_token).to(Scalar::I64);
        let pair = (thread.rem_u(of_token) * i32::from(self.lanes)).to(Scalar::I64).named("pair");
        let inside = thread.lt(of_token * tokens) & batch.lt(q.extent(0)) & token.lt(q.extent(1));
        k.if_(inside, || {
            let position = match (positions, first) {
                (Some(positions), _) => positions.at([batch, token]).load().to(Scalar::I64),
                (None, Some(first)) => token + first,
                (None, None) => token,
            };
            let known = match self.angles {
                Angles::Frequencies => k.bool(true),
                _ => position.ge(0) & position.lt(tables[0].extent(0)),
            };
            k.if_(known, || {
                let load = |at: Option<Val<'b>>, view: PlaceRef<'b>| {
                    let vector = self.lanes > 1;
                    match at {
                        Some(at) if vector => view.at([at, pair]).load_vector(self.lanes),
                        Some(at) => view.at([at, pair]).load(),
                        None if vector => view.at([pair]).load_vector(self.lanes),
                        None => view.at([pair]).load(),
                    }
                };
                let (cos, sin) = match self.angles {
                    Angles::CosSin => (load(Some(position), tables[0]), load(Some(position), tables[1])),
                    Angles::Table => {
                        let angle = load(Some(position), tables[0]);
                        (angle.cos(), angle.sin())
                    }
                    Angles::Frequencies => {
                        let position = position.to(Scalar::F32);
                        let position = if self.lanes > 1 { position.splat(self.lanes) } else { position };
                        let angle = position * load(None, tables[0]);
                        (angle.cos(), angle.sin())
                    }
                };
                let sin = if self.inverse { -sin } else { sin };
                let group = k.block_id(Axis::Y);
                let of_q = ((q.extent(2) + (HEADS - 1)) / HEADS).to(Scalar::I32);
                let turn = |view: PlaceRef<'b>, group: Val<'b>| {
                    let first = group.to(Scalar::I64) * HEADS;
                    let n = view.extent(2);
                    k.if_else(
                        (first + HEADS).le(n),
                        || {
                            self.turn(
                                view,
                                [batch, token, pair],
                                &[0, 1, 2, 3].map(|at| first + at),
                                (cos, sin),
                            )
                        },
                        || {
                            k.range(first, n)
                                .each(|head| self.turn(view, [batch, token, pair], &[head], (cos, sin)))
                        },
                    );
                };
                k.if_else(group.lt(of_q), || turn(q, group), || turn(key, group - of_q));
            });
        });
    }

    /// Turns a thread's pairs of these heads.
    fn turn<'b>(
        self,
        view: PlaceRef<'b>,
        [batch, token, pair]: [Val<'b>; 3],
        heads: &[Val<'b>],
        (cos, sin): (Val<'b>, Val<'b>),
    ) {
        let k = pair.builder();
        let (half, lanes) = (i64::from(self.dim / 2), self.lanes);
        let at = |head: Val<'b>, column: Val<'b>| view.at([batch, token, head, column]).cached(Cache::Stream);
        let loaded = heads.iter().map(|head| match self.pairs {
            Pairs::Halves => [pair, pair + half].map(|column| match lanes {
                1 => at(*head, column).load().to(Scalar::F32),
                _ => at(*head, column).load_vector(lanes).to(Scalar::F32),
            }),
            Pairs::Interleaved => {
                let both = at(*head, pair * 2).load_vector(2 * lanes).to(Scalar::F32);
                [0, 1].map(|odd| match lanes {
                    1 => both.lane(odd),
                    _ => k.vector(&(0..lanes).map(|lane| both.lane(2 * lane + odd)).collect::<Vec<_>>()),
                })
            }
        });
        let loaded: Vec<_> = loaded.collect();
        for (head, [a, b]) in heads.iter().zip(loaded) {
            let (a, b) = (a * cos - b * sin, b * cos + a * sin);
            match self.pairs {
                Pairs::Halves => {
                    at(*head, pair).store(a.to(self.element));
                    at(*head, pair + half).store(b.to(self.element));
                }
                Pairs::Interleaved => {
                    let lane = |value: Val<'b>, lane: u8| if lanes == 1 { value } else { value.lane(lane) };
                    let both: Vec<_> = (0..lanes).flat_map(|at| [lane(a, at), lane(b, at)]).collect();
                    at(*head, pair * 2).store(k.vector(&both).to(self.element));
                }
            }
        }
    }
}

/// Rotary position embedding (Su et al., RoFormer) of queries and keys in place, in one launch. Each pair (a, b) of a head becomes (a cos θ − b sin θ, b cos θ + a sin θ), where
/// θ is the angle of its position and its number. The gradient with respect to what was there before is the same with −θ: `inverse`.
///
/// Its buffers: `q`, `[batch, tokens, q_heads, dim]`; `k`, `[batch, tokens, k_heads, dim]`; `cos` and `sin`, or `angles`, f32, `[rows, dim / 2]`, or `frequencies`, f32,
/// `[dim / 2]`; `positions`, i32, `[batch, tokens]`, if they are given, else a token's position is its number in the sequence and `first`. Tokens whose position is not
/// below `rows` stay as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rope {
    /// Sequences.
    pub batch: u64,
    /// Tokens of each.
    pub tokens: u64,
    /// Heads of queries.
    pub q_heads: u64,
    /// Heads of keys; may be fewer, and none.
    pub k_heads: u64,
    /// Elements of a head: even.
    pub dim: u32,
    /// Positions that the tables of angles have.
    pub rows: u64,
    /// Which elements of a head are a pair.
    pub pairs: Pairs,
    /// Where angles come from.
    pub angles: Angles,
    /// Are positions in memory?
    pub positions: bool,
    /// The first token's position, where they are not.
    pub first: u32,
    /// Does it turn back, for the gradient?
    pub inverse: bool,
    /// What q and k hold: f32, f16 or bf16.
    pub element: Scalar,
    /// Bytes to whose multiples q and k are aligned; 16 is fast.
    pub align: u32,
}

impl Function for Rope {
    fn buffers(&self) -> Vec<Buffer> {
        let Rope { batch, tokens, q_heads, k_heads, dim, rows, element, .. } = *self;
        let (dim, half) = (u64::from(dim), u64::from(dim / 2));
        let mut all = vec![
            Buffer::new("q", element, &[batch, tokens, q_heads, dim], Access::ReadWrite),
            Buffer::new("k", element, &[batch, tokens, k_heads, dim], Access::ReadWrite),
        ];
        let table = |name| Buffer::new(name, Scalar::F32, &[rows, half], Access::Read);
        match self.angles {
            Angles::CosSin => all.extend([table("cos"), table("sin")]),
            Angles::Table => all.push(table("angles")),
            Angles::Frequencies => all.push(Buffer::new("frequencies", Scalar::F32, &[half], Access::Read)),
        }
        all.extend(
            self.positions.then(|| Buffer::new("positions", Scalar::I32, &[batch, tokens], Access::Read)),
        );
        all
    }

    fn graph(&self) -> Result<ValidGraph, NoGraph> {
        graph::rope::rope(self)
    }

    fn call(&self, _: &Resources) -> Result<Call, CallError> {
        const NAME: &str = "rope";
        let Rope {
            batch,
            tokens,
            q_heads,
            k_heads,
            dim,
            pairs,
            angles,
            positions,
            inverse,
            element,
            align,
            ..
        } = *self;
        floats(NAME, &[element])?;
        let unsupported = |what: String| CallError::Unsupported { function: NAME, what };
        if dim == 0 || dim % 2 != 0 {
            return Err(unsupported(format!("heads of {dim} elements; they are of an even number")));
        }
        let most = (16.min(align) / element.bytes()).clamp(1, 8) as u8;
        let most = if pairs == Pairs::Halves { most } else { (most / 2).max(1) };
        let mut lanes = [8u8, 4, 2, 1].into_iter().filter(|lanes| *lanes <= most);
        let lanes = lanes.find(|lanes| (dim / 2).is_multiple_of((*lanes).into())).unwrap_or(1);
        // A pair alone is a vector, of which an alignment must not be asked where there is none.
        let kernel = Rotate { element, dim, pairs, angles, positions, inverse, lanes };
        if kernel.of_token() > THREADS {
            return Err(unsupported(format!(
                "heads of {dim} elements; at most {} of these",
                2 * THREADS * u32::from(lanes)
            )));
        }
        if [batch, tokens].contains(&0) || q_heads == 0 && k_heads == 0 {
            return Ok(Call::default());
        }
        if batch.max(q_heads).max(k_heads) >= 1 << 31 {
            return Err(unsupported(format!(
                "{batch} sequences with {q_heads} and {k_heads} heads; fewer than 2^31 are taken"
            )));
        }
        // Heads for which a grid has no room along y have launches of their own.
        let most = HEADS.cast_unsigned() * u64::from(MAX_GRID_YZ);
        let groups = |heads: u64| heads.div_ceil(HEADS.cast_unsigned());
        let parts =
            |heads: u64| (0..heads.div_ceil(most)).map(move |at| [at * most, most.min(heads - at * most)]);
        let heads: Vec<[[u64; 2]; 2]> = match groups(q_heads) + groups(k_heads) <= MAX_GRID_YZ.into() {
            true => vec![[[0, q_heads], [0, k_heads]]],
            false => {
                let of_q = parts(q_heads).map(|part| [part, [0, 0]]);
                of_q.chain(parts(k_heads).map(|part| [[0, 0], part])).collect()
            }
        };
        let tokens = blocks(NAME, tokens, kernel.tokens().into())?;
        let mut launches = Vec::new();
        for heads in heads {
            let view = |(at, buffer): (usize, Buffer)| {
                let whole = Operand::whole(at, buffer.element, &buffer.extents);
                match buffer.name {
                    "q" | "k" => (whole.part(Some(2), heads[at]), [None, Some(0)]),
                    "positions" => (whole, [None, Some(0)]),
                    _ => (whole, [None; 2]),
                }
            };
            let mut operands: Vec<_> = self.buffers().into_iter().enumerate().map(view).collect();
            operands.extend((!positions).then(|| (Operand::i64(self.first.into()), [None; 2])));
            let along_y = heads.iter().map(|[_, count]| groups(*count)).sum();
            launches.extend(Launch::folded(Entry::Rotate(kernel), tokens, [along_y, batch], &operands));
        }
        Ok(Call { launches, workspace: 0 })
    }

    fn call_strided(&self, buffers: &[Buffer], resources: &Resources) -> Result<Call, CallError> {
        let align = aligned(self.align, &buffers[..2]);
        Rope { align, ..*self }.call(resources)
    }
}
