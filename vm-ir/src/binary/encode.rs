//! Modules to bytes.

use super::{
    MAGIC, WITH_CLUSTERS, WITH_LINES, WITH_LOCALS, WITH_NAMES, WITH_RESIDENT, WITH_TILES, has_names,
    has_tiles,
};
use crate::module::{Kernel, Line, Module, Op, ParamKind, Place, Region, Value};
use crate::tile::Tile;
use crate::view::{Access, Dim};

/// Whether the lines that messages name travel along.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lines {
    /// With lines.
    Keep,
    /// Without: equal modules give equal bytes, as a cache key needs it.
    Strip,
}

/// The bytes of a module.
pub fn encode(module: &Module, lines: Lines) -> Vec<u8> {
    let clusters = module.kernels.iter().any(|kernel| kernel.cluster != 1);
    let tiles = module.kernels.iter().any(has_tiles);
    let resident = module.kernels.iter().any(|kernel| kernel.resident != 0);
    let locals = module.kernels.iter().any(|kernel| !kernel.local.is_empty());
    let lines = lines == Lines::Keep;
    let mut out = Encoder { out: Vec::new(), lines, clusters, resident, locals, tiles };
    out.out.extend_from_slice(&MAGIC);
    out.out.extend_from_slice(&Module::VERSION.to_le_bytes());
    let names = module.kernels.iter().any(has_names);
    let flags = [
        (out.lines, WITH_LINES),
        (clusters, WITH_CLUSTERS),
        (tiles, WITH_TILES),
        (names, WITH_NAMES),
        (resident, WITH_RESIDENT),
        (locals, WITH_LOCALS),
    ];
    let flags = flags.iter().filter(|(set, _)| *set).fold(0, |flags, (_, flag)| flags | flag);
    out.out.extend_from_slice(&flags.to_le_bytes());
    out.number(module.kernels.len() as u64);
    module.kernels.iter().for_each(|k| out.kernel(k));
    out.out
}

struct Encoder {
    out: Vec<u8>,
    lines: bool,
    clusters: bool,
    resident: bool,
    locals: bool,
    tiles: bool,
}

impl Encoder {
    fn byte(&mut self, byte: u8) {
        self.out.push(byte);
    }

    fn number(&mut self, mut number: u64) {
        while number >= 0x80 {
            self.byte(number as u8 | 0x80);
            number >>= 7;
        }
        self.byte(number as u8);
    }

    fn signed(&mut self, number: i64) {
        self.number(((number << 1) ^ (number >> 63)) as u64);
    }

    fn text(&mut self, text: &str) {
        self.number(text.len() as u64);
        self.out.extend_from_slice(text.as_bytes());
    }

    fn line(&mut self, line: Line) {
        if self.lines {
            self.number(line.0.into());
        }
    }

    fn uses(&mut self, values: &[Value]) {
        self.number(values.len() as u64);
        values.iter().for_each(|v| self.number(v.0.into()));
    }

    fn definitions(&mut self, kernel: &Kernel, values: &[Value]) {
        self.number(values.len() as u64);
        for value in values {
            let def = &kernel.values[value.index()];
            self.byte(def.ty.code());
            self.text(def.name.as_deref().unwrap_or(""));
        }
    }

    fn kernel(&mut self, kernel: &Kernel) {
        self.text(&kernel.name);
        self.number(kernel.guest.0);
        self.line(kernel.line);
        kernel.block.iter().for_each(|side| self.number((*side).into()));
        if self.clusters {
            self.number(kernel.cluster.into());
        }
        if self.resident {
            self.number(kernel.resident.into());
        }
        self.number(kernel.params.len() as u64);
        for param in &kernel.params {
            self.text(&param.name);
            match &param.kind {
                ParamKind::View(view) => {
                    self.byte(if view.surface { 2 } else { 0 });
                    self.byte(view.element.code());
                    self.byte(Access::ALL.iter().position(|a| *a == view.access).unwrap_or(0) as u8);
                    self.number(view.align.into());
                    self.number(view.dims.len() as u64);
                    for (i, dim) in view.dims.iter().enumerate() {
                        match (dim, view.names.get(i).and_then(Option::as_deref)) {
                            (Dim::Any { multiple }, None) => {
                                self.byte(0);
                                self.number((*multiple).into());
                            }
                            (Dim::Any { multiple }, Some(name)) => {
                                self.byte(2);
                                self.number((*multiple).into());
                                self.text(name);
                            }
                            (Dim::Fixed(extent), _) => {
                                self.byte(1);
                                self.number(*extent);
                            }
                        }
                    }
                }
                ParamKind::Scalar { value, range } => {
                    self.byte(1);
                    self.byte(kernel.type_of(*value).code());
                    match range {
                        None => self.byte(0),
                        Some((least, greatest)) => {
                            self.byte(1);
                            self.signed(*least);
                            self.signed(*greatest);
                        }
                    }
                }
            }
        }
        self.number(kernel.shared.len() as u64);
        for array in &kernel.shared {
            self.text(&array.name);
            self.byte(array.element.code());
            self.number(array.dims.len() as u64);
            array.dims.iter().for_each(|d| self.number((*d).into()));
            self.line(array.line);
        }
        if self.locals {
            self.number(kernel.local.len() as u64);
            for array in &kernel.local {
                self.text(&array.name);
                self.number(array.len.into());
                self.line(array.line);
            }
        }
        if self.tiles {
            self.tile(kernel.tile.as_deref());
        }
        self.region(kernel, &kernel.body);
    }

    fn tile(&mut self, tile: Option<&Tile>) {
        let Some(tile) = tile else { return self.byte(0) };
        self.byte(1);
        self.number(tile.groups.into());
        self.number(tile.channels.len() as u64);
        for channel in &tile.channels {
            self.text(&channel.name);
            self.byte(channel.element.code());
            channel.dims.iter().for_each(|d| self.number((*d).into()));
            self.number(channel.stages.into());
            self.byte(channel.multicast.into());
            self.line(channel.line);
        }
        self.number(tile.fragments.len() as u64);
        for fragment in &tile.fragments {
            self.text(&fragment.name);
            self.byte(fragment.element.code());
            self.number(fragment.rows.into());
            match fragment.columns {
                None => self.byte(0),
                Some(columns) => {
                    self.byte(1);
                    self.number(columns.into());
                }
            }
            self.line(fragment.line);
        }
    }

    fn place(&mut self, place: Option<Place>) {
        let (kind, index) = match place {
            None => return self.byte(0),
            Some(Place::View(index)) => (1, index),
            Some(Place::Shared(index)) => (2, index),
            Some(Place::Channel(index)) => (3, index),
            Some(Place::Fragment(index)) => (4, index),
            Some(Place::Local(index)) => (5, index),
        };
        self.byte(kind);
        self.number(index.into());
    }

    fn region(&mut self, kernel: &Kernel, region: &Region) {
        self.definitions(kernel, &region.args);
        self.number(region.ops.len() as u64);
        region.ops.iter().for_each(|op| self.op(kernel, op));
        self.uses(&region.yields);
        self.line(region.yield_line);
    }

    fn op(&mut self, kernel: &Kernel, op: &Op) {
        let row = op.code.info();
        self.number(row.code.into());
        op.attrs.iter().take(row.attrs.len()).for_each(|a| self.byte(*a));
        self.place(op.place);
        if self.tiles {
            self.number(op.others.len() as u64);
            op.others.iter().for_each(|place| self.place(Some(*place)));
        }
        self.uses(&op.operands);
        self.number(op.immediates.len() as u64);
        op.immediates.iter().for_each(|i| self.number(*i));
        self.number(op.regions.len() as u64);
        op.regions.iter().for_each(|r| self.region(kernel, r));
        self.definitions(kernel, &op.results);
        self.line(op.line);
    }
}
