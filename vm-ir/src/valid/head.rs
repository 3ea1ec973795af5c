//! Rules on a kernel's head: names, block, parameters, shared arrays.

use super::check::Checker;
use super::error::Rule;
use crate::limits::{
    MAX_BLOCK_XY, MAX_BLOCK_Z, MAX_CLUSTER, MAX_EXTENT, MAX_LOCAL_BYTES, MAX_PARAMS, MAX_RANK, MAX_RESIDENT,
    MAX_SHARED_ARRAYS, MAX_THREADS, WARP,
};
use crate::module::{ParamKind, is_name};
use crate::types::{Class, Type};
use crate::view::{Dim, ViewType};
use std::collections::{HashMap, HashSet};

impl<'k> Checker<'k> {
    /// Checks the head.
    pub(super) fn head(&mut self) {
        let kernel = self.kernel;
        self.line = kernel.line;
        self.name(&kernel.name);
        self.block();
        self.cap("parameters", kernel.params.len(), MAX_PARAMS);
        let mut places = HashSet::new();
        let mut values = HashSet::new();
        let mut extents = HashMap::new();
        for param in &kernel.params {
            self.line = if param.line.0 == 0 { kernel.line } else { param.line };
            self.name(&param.name);
            match &param.kind {
                ParamKind::View(view) => {
                    if !places.insert(&*param.name) {
                        self.error(Rule::DuplicateName(format!("@{}", param.name)));
                    }
                    self.view(&param.name, view);
                    self.extent_names(&param.name, view, &mut extents);
                }
                ParamKind::Scalar { value, range } => {
                    let ty = kernel.type_of(*value);
                    self.scalar_param(&param.name, ty, *range);
                    self.visible[value.index()] = true;
                }
            }
        }
        self.line = kernel.line;
        for value in &kernel.values {
            if let Some(name) = &value.name {
                self.name(name);
                if !values.insert(name) {
                    self.error(Rule::DuplicateName(format!("%{name}")));
                }
            }
        }
        for array in &kernel.shared {
            self.line = array.line;
            self.name(&array.name);
            if !places.insert(&*array.name) {
                self.error(Rule::DuplicateName(format!("@{}", array.name)));
            }
            self.element(&array.name, array.element);
            if array.is_empty() || array.dims.is_empty() || array.dims.len() > MAX_RANK {
                self.error(Rule::SharedDims(array.name.to_string()));
            }
            self.facts.shared_bytes = self.facts.shared_bytes.saturating_add(array.bytes());
            if self.facts.shared_bytes > self.caps.shared {
                let (bytes, limit) = (self.facts.shared_bytes, self.caps.shared);
                self.error(Rule::SharedSize { bytes, limit });
                break;
            }
        }
        self.cap("arrays", kernel.shared.len() + kernel.local.len(), MAX_SHARED_ARRAYS);
        for array in &kernel.local {
            self.line = array.line;
            self.name(&array.name);
            if !places.insert(&*array.name) {
                self.error(Rule::DuplicateName(format!("@{}", array.name)));
            }
            if array.len == 0 {
                self.error(Rule::SharedDims(array.name.to_string()));
            }
        }
        if kernel.local_bytes() > MAX_LOCAL_BYTES {
            self.error(Rule::LocalSize { bytes: kernel.local_bytes(), limit: MAX_LOCAL_BYTES });
        }
        if let Some(tile) = kernel.tile() {
            self.tile(tile, &mut places);
        }
    }

    pub(super) fn name(&mut self, name: &str) {
        if !is_name(name) {
            self.error(Rule::Name(name.to_owned()));
        }
    }

    fn block(&mut self) {
        let [x, y, z] = self.kernel.block;
        let sides = x >= 1 && y >= 1 && z >= 1 && x <= MAX_BLOCK_XY && y <= MAX_BLOCK_XY && z <= MAX_BLOCK_Z;
        if !sides || self.kernel.threads() > MAX_THREADS {
            self.error(Rule::BlockSize(x, y, z));
        }
        let (blocks, threads) = (self.kernel.cluster, self.kernel.threads());
        let sized = blocks.is_power_of_two() && blocks <= MAX_CLUSTER;
        let whole = threads.is_multiple_of(WARP) || self.kernel.tile.is_some();
        if blocks != 1 && !(sized && whole) {
            self.error(Rule::ClusterSize { blocks, threads });
        }
        if self.kernel.resident > MAX_RESIDENT {
            self.error(Rule::Resident(self.kernel.resident));
        }
        if self.kernel.resident != 0 && self.kernel.tile.is_some() {
            self.error(Rule::ResidentTile);
        }
    }

    pub(super) fn element(&mut self, name: &str, element: crate::types::Scalar) {
        if !element.in_memory() {
            self.error(Rule::Element { name: name.to_owned(), element });
        }
    }

    fn view(&mut self, name: &str, view: &ViewType) {
        self.element(name, view.element);
        let sensible = |dim: &Dim| match dim {
            Dim::Any { multiple } => *multiple >= 1,
            Dim::Fixed(extent) => *extent <= MAX_EXTENT,
        };
        if view.dims.is_empty() || view.dims.len() > MAX_RANK || !view.dims.iter().all(sensible) {
            self.error(Rule::ViewDims(name.to_owned()));
        }
        let least = view.element.bytes();
        if !view.align.is_power_of_two() || view.align < least || view.align > 256 {
            self.error(Rule::ViewAlign { name: name.to_owned(), align: view.align, least });
        }
        if view.surface {
            self.surface(name, view);
        }
    }

    fn surface(&mut self, name: &str, view: &ViewType) {
        use crate::types::Scalar::{F16, F32, I8, I16, I32};
        let what = if self.kernel.tile.is_some() {
            "a tile kernel has none"
        } else if !matches!(view.element, I8 | I16 | I32 | F16 | F32) {
            "its elements are i8, i16, i32, f16 or f32"
        } else if !matches!(view.rank(), 3 | 4) || !matches!(view.pixel(), Some(1 | 2 | 4)) {
            "it has rows, columns and 1, 2 or 4 lanes, as in [?, ?, 4], behind its layers if it has any"
        } else if view.align != view.element.bytes() {
            "its pixels have no addresses to align"
        } else {
            return;
        };
        self.error(Rule::Surface { name: name.to_owned(), what: what.to_owned() });
    }

    /// Checks the names of a view's extents; `multiples` are those of the names before.
    fn extent_names(&mut self, view: &str, ty: &'k ViewType, multiples: &mut HashMap<&'k str, u32>) {
        for (dimension, name) in ty.names.iter().enumerate() {
            let Some(name) = name.as_deref() else { continue };
            let what = match ty.dims.get(dimension) {
                _ if !is_name(name) => "which is no name".to_owned(),
                Some(Dim::Any { multiple }) => {
                    let first = *multiples.entry(name).or_insert(*multiple);
                    if first == *multiple {
                        continue;
                    }
                    format!("a multiple of {multiple} here and of {first} before; write the same in both")
                }
                Some(Dim::Fixed(_)) => "which is fixed already".to_owned(),
                None => "a dimension that it has not".to_owned(),
            };
            self.error(Rule::ExtentName { view: view.to_owned(), name: name.to_owned(), what });
        }
    }

    fn scalar_param(&mut self, name: &str, ty: Type, range: Option<(i64, i64)>) {
        if ty.is_vector() || !Class::DATA.contains(ty.scalar()) {
            self.error(Rule::ParamType { name: name.to_owned(), ty });
        }
        let Some((least, greatest)) = range else { return };
        let half = ty.scalar().mask() >> 1;
        let fits = |v: i64| i128::from(v) <= i128::from(half) && i128::from(v) >= -i128::from(half) - 1;
        if !ty.scalar().is_int() || least > greatest || !fits(least) || !fits(greatest) {
            self.error(Rule::ParamRange(name.to_owned()));
        }
    }
}
