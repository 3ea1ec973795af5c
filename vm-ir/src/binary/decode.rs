//! Bytes to modules. The bytes may come from anyone.

use super::{
    MAGIC, WITH_CLUSTERS, WITH_LINES, WITH_LOCALS, WITH_NAMES, WITH_RESIDENT, WITH_TILES, has_names,
    has_tiles,
};
use crate::limits::{
    MAX_CARRIED, MAX_CASES, MAX_CHANNELS, MAX_DEPTH, MAX_FRAGMENTS, MAX_KERNELS, MAX_MODULE_BYTES, MAX_NAME,
    MAX_OPS, MAX_PARAMS, MAX_RANK, MAX_SHARED_ARRAYS,
};
use crate::module::{
    GuestAddr, Kernel, Line, LocalArray, Module, Numbering, Op, Param, ParamKind, Place, Region, SharedArray,
    Value, is_name,
};
use crate::op::Opcode;
use crate::tile::{Channel, Fragment, Tile};
use crate::types::{Scalar, Type};
use crate::view::{Access, Dim, ViewType};
use std::collections::HashSet;

/// Bytes that are no module: what is wrong, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("byte {offset}: {kind}")]
pub struct DecodeError {
    /// The offset of the byte at which it was noticed.
    pub offset: usize,
    /// What is wrong.
    pub kind: DecodeErrorKind,
}

/// What is wrong with bytes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeErrorKind {
    /// They end too early.
    #[error("the module ends here, in the middle")]
    Truncated,
    /// They go on after the end.
    #[error("{0} bytes follow the module")]
    Trailing(usize),
    /// They do not begin as a module does.
    #[error("not a binary module: it does not begin with 00 'vir'")]
    Magic,
    /// They are of another version.
    #[error("the module is of version {0}; this is version {ours}", ours = Module::VERSION)]
    Version(u16),
    /// A flag that has no meaning.
    #[error("flags {0:#x} have no meaning")]
    Flags(u16),
    /// A number that is not in its shortest form, or too large for what it counts.
    #[error("no {0}: too large, or not in the shortest form")]
    Number(&'static str),
    /// A code that has no meaning.
    #[error("{code:#x} is no {what}")]
    Code {
        /// Of what.
        what: &'static str,
        /// The code.
        code: u64,
    },
    /// A cap is reached.
    #[error("{found} {what}; at most {limit} are allowed")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many there are.
        found: u64,
        /// The cap.
        limit: usize,
    },
    /// Not a name.
    #[error("a name that is not of at most 64 letters, digits and _, or that begins with a digit")]
    Name,
    /// A name that is taken.
    #[error("the name {0} is used twice")]
    Duplicate(String),
    /// A use of a value that is not defined yet.
    #[error("value {0} is not defined yet")]
    UndefinedValue(u64),
    /// Too many values or ops in a kernel.
    #[error("{0}")]
    TooLarge(String),
}

type Result<T> = std::result::Result<T, DecodeError>;

/// Reads a module.
///
/// # Errors
///
/// The first thing in the bytes that is not as [`binary`](super) says.
pub fn decode(bytes: &[u8]) -> Result<Module> {
    let mut decoder = Decoder {
        bytes,
        at: 0,
        lines: false,
        clusters: false,
        resident: false,
        locals: false,
        tiles: false,
        numbering: Numbering::default(),
        names: HashSet::new(),
    };
    decoder.module()
}

struct Decoder<'b> {
    bytes: &'b [u8],
    at: usize,
    lines: bool,
    clusters: bool,
    resident: bool,
    locals: bool,
    tiles: bool,
    numbering: Numbering,
    names: HashSet<Box<str>>,
}

impl Decoder<'_> {
    fn error<T>(&self, kind: DecodeErrorKind) -> Result<T> {
        Err(DecodeError { offset: self.at, kind })
    }

    fn take(&mut self, count: usize) -> Result<&[u8]> {
        match self.bytes.get(self.at..).and_then(|rest| rest.get(..count)) {
            Some(bytes) => {
                self.at += count;
                Ok(bytes)
            }
            None => self.error(DecodeErrorKind::Truncated),
        }
    }

    fn byte(&mut self) -> Result<u8> {
        Ok(self.take(1)?[0])
    }

    fn u16(&mut self) -> Result<u16> {
        let bytes = self.take(2)?;
        Ok(u16::from_le_bytes([bytes[0], bytes[1]]))
    }

    fn number(&mut self) -> Result<u64> {
        let mut number = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let low = u64::from(byte & 0x7f);
            if shift == 63 && byte > 1 || shift > 0 && byte == 0 {
                return self.error(DecodeErrorKind::Number("number of 64 bits"));
            }
            number |= low << shift;
            if byte & 0x80 == 0 {
                return Ok(number);
            }
        }
        self.error(DecodeErrorKind::Number("number of 64 bits"))
    }

    fn narrow<T: TryFrom<u64>>(&mut self, what: &'static str) -> Result<T> {
        let number = self.number()?;
        T::try_from(number).or_else(|_| self.error(DecodeErrorKind::Number(what)))
    }

    fn signed(&mut self) -> Result<i64> {
        let number = self.number()?;
        Ok((number >> 1) as i64 ^ -((number & 1) as i64))
    }

    /// A count within its cap. What is counted takes at least a byte each, so a count beyond the rest of the
    /// bytes is refused before anything is set aside for it.
    fn count(&mut self, what: &'static str, limit: usize) -> Result<usize> {
        let found = self.number()?;
        if found > limit as u64 {
            return self.error(DecodeErrorKind::TooMany { what, found, limit });
        }
        if found > (self.bytes.len() - self.at) as u64 {
            return self.error(DecodeErrorKind::Truncated);
        }
        Ok(found as usize)
    }

    fn optional_name(&mut self) -> Result<Option<Box<str>>> {
        let length = self.count("bytes in a name", MAX_NAME)?;
        let bytes = self.take(length)?;
        match std::str::from_utf8(bytes) {
            Ok("") => Ok(None),
            Ok(name) if is_name(name) => Ok(Some(name.into())),
            _ => self.error(DecodeErrorKind::Name),
        }
    }

    fn name(&mut self) -> Result<Box<str>> {
        match self.optional_name()? {
            Some(name) => Ok(name),
            None => self.error(DecodeErrorKind::Name),
        }
    }

    fn line(&mut self) -> Result<Line> {
        if self.lines { Ok(Line(self.narrow("line")?)) } else { Ok(Line(0)) }
    }

    fn scalar(&mut self) -> Result<Scalar> {
        let code = self.byte()?;
        match Scalar::from_code(code) {
            Some(scalar) => Ok(scalar),
            None => self.error(DecodeErrorKind::Code { what: "scalar", code: code.into() }),
        }
    }

    fn value_type(&mut self) -> Result<Type> {
        let code = self.byte()?;
        match Type::from_code(code) {
            Some(ty) => Ok(ty),
            None => self.error(DecodeErrorKind::Code { what: "type", code: code.into() }),
        }
    }

    fn define(&mut self, ty: Type, name: Option<Box<str>>) -> Result<Value> {
        if let Some(name) = &name
            && !self.names.insert(name.clone())
        {
            return self.error(DecodeErrorKind::Duplicate(format!("%{name}")));
        }
        self.numbering.define(ty, name).or_else(|e| self.error(DecodeErrorKind::TooLarge(e.to_string())))
    }

    fn definitions(&mut self, limit: usize) -> Result<Vec<Value>> {
        let count = self.count("values in a list", limit)?;
        (0..count)
            .map(|_| {
                let ty = self.value_type()?;
                let name = self.optional_name()?;
                self.define(ty, name)
            })
            .collect()
    }

    fn uses(&mut self) -> Result<Vec<Value>> {
        let count = self.count("values in a list", MAX_CARRIED + MAX_RANK)?;
        (0..count)
            .map(|_| {
                let number = self.number()?;
                if number >= self.numbering.values.len() as u64 {
                    return self.error(DecodeErrorKind::UndefinedValue(number));
                }
                Ok(Value(number as u32))
            })
            .collect()
    }

    fn module(&mut self) -> Result<Module> {
        if self.bytes.len() > MAX_MODULE_BYTES {
            let found = self.bytes.len() as u64;
            return self.error(DecodeErrorKind::TooMany {
                what: "bytes in a module",
                found,
                limit: MAX_MODULE_BYTES,
            });
        }
        if self.take(4)? != MAGIC {
            self.at = 0;
            return self.error(DecodeErrorKind::Magic);
        }
        let version = self.u16()?;
        if version != Module::VERSION {
            return self.error(DecodeErrorKind::Version(version));
        }
        let flags = self.u16()?;
        let known = WITH_LINES | WITH_CLUSTERS | WITH_TILES | WITH_NAMES | WITH_RESIDENT | WITH_LOCALS;
        if flags & !known != 0 {
            return self.error(DecodeErrorKind::Flags(flags));
        }
        self.lines = flags & WITH_LINES != 0;
        self.clusters = flags & WITH_CLUSTERS != 0;
        self.resident = flags & WITH_RESIDENT != 0;
        self.locals = flags & WITH_LOCALS != 0;
        self.tiles = flags & WITH_TILES != 0;
        let count = self.count("kernels", MAX_KERNELS)?;
        let kernels: Vec<Kernel> = (0..count).map(|_| self.kernel()).collect::<Result<_>>()?;
        if self.clusters && kernels.iter().all(|kernel| kernel.cluster == 1)
            || self.resident && kernels.iter().all(|kernel| kernel.resident == 0)
            || self.locals && kernels.iter().all(|kernel| kernel.local.is_empty())
            || self.tiles && !kernels.iter().any(has_tiles)
            || (flags & WITH_NAMES != 0) != kernels.iter().any(has_names)
        {
            return self.error(DecodeErrorKind::Flags(flags));
        }
        let mut names = HashSet::new();
        if let Some(kernel) = kernels.iter().find(|k| !names.insert(&k.name)) {
            return self.error(DecodeErrorKind::Duplicate(format!("@{}", kernel.name)));
        }
        match self.bytes.len() - self.at {
            0 => Ok(Module { kernels }),
            rest => self.error(DecodeErrorKind::Trailing(rest)),
        }
    }

    fn kernel(&mut self) -> Result<Kernel> {
        self.numbering = Numbering::default();
        self.names.clear();
        let mut places = HashSet::new();
        let name = self.name()?;
        let guest = GuestAddr(self.number()?);
        let line = self.line()?;
        let block = [self.narrow("block size")?, self.narrow("block size")?, self.narrow("block size")?];
        let cluster = if self.clusters { self.narrow("cluster size")? } else { 1 };
        let resident = if self.resident { self.narrow("resident blocks")? } else { 0 };
        let mut params = Vec::new();
        for _ in 0..self.count("parameters", MAX_PARAMS)? {
            let param = self.param()?;
            if matches!(param.kind, ParamKind::View(_)) && !places.insert(param.name.clone()) {
                return self.error(DecodeErrorKind::Duplicate(format!("@{}", param.name)));
            }
            params.push(param);
        }
        let mut shared = Vec::new();
        for _ in 0..self.count("shared arrays", MAX_SHARED_ARRAYS)? {
            shared.push(self.shared_array(&mut places)?);
        }
        let mut local = Vec::new();
        if self.locals {
            for _ in 0..self.count("local arrays", MAX_SHARED_ARRAYS)? {
                let (name, len) = (self.place_name(&mut places)?, self.narrow("extent")?);
                local.push(LocalArray { name, len, line: self.line()? });
            }
        }
        let tile = if self.tiles { self.tile(&mut places)?.map(Box::new) } else { None };
        let body = self.region(1)?;
        let values = std::mem::take(&mut self.numbering.values);
        Ok(Kernel { name, guest, block, cluster, resident, params, shared, local, tile, values, body, line })
    }

    fn tile(&mut self, places: &mut HashSet<Box<str>>) -> Result<Option<Tile>> {
        if !self.is_there("tile")? {
            return Ok(None);
        }
        let groups = self.narrow("number of groups")?;
        let mut tile = Tile { groups, channels: Vec::new(), fragments: Vec::new() };
        for _ in 0..self.count("channels", MAX_CHANNELS)? {
            let (name, element) = (self.place_name(places)?, self.scalar()?);
            let dims = [self.narrow("extent")?, self.narrow("extent")?];
            let stages = self.narrow("number of stages")?;
            let multicast = self.is_there("multicast")?;
            tile.channels.push(Channel { name, element, dims, stages, multicast, line: self.line()? });
        }
        for _ in 0..self.count("fragments", MAX_FRAGMENTS)? {
            let (name, element) = (self.place_name(places)?, self.scalar()?);
            let rows = self.narrow("extent")?;
            let columns =
                if self.is_there("fragment's columns")? { Some(self.narrow("extent")?) } else { None };
            tile.fragments.push(Fragment { name, element, rows, columns, line: self.line()? });
        }
        Ok(Some(tile))
    }

    /// Does the byte say that something follows?
    fn is_there(&mut self, what: &'static str) -> Result<bool> {
        match self.byte()? {
            0 => Ok(false),
            1 => Ok(true),
            code => self.error(DecodeErrorKind::Code { what, code: code.into() }),
        }
    }

    fn place_name(&mut self, places: &mut HashSet<Box<str>>) -> Result<Box<str>> {
        let name = self.name()?;
        if !places.insert(name.clone()) {
            return self.error(DecodeErrorKind::Duplicate(format!("@{name}")));
        }
        Ok(name)
    }

    fn place(&mut self) -> Result<Option<Place>> {
        Ok(Some(match self.byte()? {
            0 => return Ok(None),
            1 => Place::View(self.narrow("view")?),
            2 => Place::Shared(self.narrow("shared array")?),
            3 if self.tiles => Place::Channel(self.narrow("channel")?),
            4 if self.tiles => Place::Fragment(self.narrow("fragment")?),
            5 if self.locals => Place::Local(self.narrow("local array")?),
            kind => return self.error(DecodeErrorKind::Code { what: "place", code: kind.into() }),
        }))
    }

    fn param(&mut self) -> Result<Param> {
        let name = self.name()?;
        let kind = match self.byte()? {
            code @ (0 | 2) => {
                let element = self.scalar()?;
                let access = self.byte()?;
                let Some(access) = Access::ALL.get(usize::from(access)).copied() else {
                    return self.error(DecodeErrorKind::Code { what: "access", code: access.into() });
                };
                let align = self.narrow("alignment")?;
                let rank = self.count("dimensions", MAX_RANK)?;
                let (mut dims, mut names) = (Vec::new(), <[Option<Box<str>>; MAX_RANK]>::default());
                for name in names.iter_mut().take(rank) {
                    dims.push(self.dim(name)?);
                }
                ParamKind::View(ViewType { element, dims, names, access, align, surface: code == 2 })
            }
            1 => {
                let ty = self.value_type()?;
                let value = self.define(ty, Some(name.clone()))?;
                let range = match self.byte()? {
                    0 => None,
                    1 => Some((self.signed()?, self.signed()?)),
                    code => return self.error(DecodeErrorKind::Code { what: "range", code: code.into() }),
                };
                ParamKind::Scalar { value, range }
            }
            code => return self.error(DecodeErrorKind::Code { what: "parameter", code: code.into() }),
        };
        Ok(Param { name, kind, line: Line(0) })
    }

    fn dim(&mut self, name: &mut Option<Box<str>>) -> Result<Dim> {
        match self.byte()? {
            0 => Ok(Dim::Any { multiple: self.narrow("multiple")? }),
            1 => Ok(Dim::Fixed(self.number()?)),
            2 => {
                let multiple = self.narrow("multiple")?;
                *name = Some(self.name()?);
                Ok(Dim::Any { multiple })
            }
            code => self.error(DecodeErrorKind::Code { what: "dimension", code: code.into() }),
        }
    }

    fn shared_array(&mut self, places: &mut HashSet<Box<str>>) -> Result<SharedArray> {
        let name = self.place_name(places)?;
        let element = self.scalar()?;
        let rank = self.count("dimensions", MAX_RANK)?;
        let dims = (0..rank).map(|_| self.narrow("extent")).collect::<Result<_>>()?;
        Ok(SharedArray { name, element, dims, line: self.line()? })
    }

    fn region(&mut self, depth: usize) -> Result<Region> {
        if depth > MAX_DEPTH {
            return self.error(DecodeErrorKind::TooMany {
                what: "nested regions",
                found: depth as u64,
                limit: MAX_DEPTH,
            });
        }
        let args = self.definitions(MAX_CARRIED + 1)?;
        let count = self.count("ops", MAX_OPS)?;
        let ops = (0..count).map(|_| self.op(depth)).collect::<Result<_>>()?;
        let yields = self.uses()?;
        Ok(Region { args, ops, yields, yield_line: self.line()? })
    }

    fn op(&mut self, depth: usize) -> Result<Op> {
        if let Err(error) = self.numbering.count_op() {
            return self.error(DecodeErrorKind::TooLarge(error.to_string()));
        }
        let number = self.number()?;
        let Some(code) = u16::try_from(number).ok().and_then(Opcode::from_code) else {
            return self.error(DecodeErrorKind::Code { what: "op", code: number });
        };
        let mut op = Op::new(code);
        for (slot, kind) in op.attrs.iter_mut().zip(code.info().attrs) {
            *slot = self.byte()?;
            if usize::from(*slot) >= kind.words().len() {
                return self.error(DecodeErrorKind::Code { what: "attribute", code: (*slot).into() });
            }
        }
        op.place = self.place()?;
        if self.tiles {
            for _ in 0..self.count("places of an op", MAX_FRAGMENTS)? {
                let Some(place) = self.place()? else {
                    return self.error(DecodeErrorKind::Code { what: "place", code: 0 });
                };
                op.others.push(place);
            }
        }
        op.operands = self.uses()?;
        let immediates = self.count("numbers of an op", MAX_CASES)?;
        op.immediates = (0..immediates).map(|_| self.number()).collect::<Result<_>>()?;
        let regions = self.count("regions of an op", MAX_CASES + 1)?;
        op.regions = (0..regions).map(|_| self.region(depth + 1)).collect::<Result<_>>()?;
        op.results = self.definitions(MAX_CARRIED)?;
        op.line = self.line()?;
        Ok(op)
    }
}
