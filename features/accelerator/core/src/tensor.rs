//! Views that kernels copy by tensor maps, and what the Tensor Memory Accelerator asks of them.

use vm_abi::{MAX_RANK, NOTHING_BYTES, Swizzle, Tile};

use crate::artifact::{Parameter, ParameterKind};
use crate::extents::Place;

/// The most rows and columns of a box.
const BOX: u32 = 256;
/// What addresses, strides and rows of boxes are multiples of, in bytes.
const UNIT: u64 = 16;
/// The most bytes of a row of a box in [`Swizzle::Bytes128`].
const SWIZZLED: u64 = 128;
/// The greatest extent, in elements: a box that begins at the last coordinate of 31 bits is out of it, however it is rounded.
const EXTENT: u64 = (1 << 31) - 64;
/// Strides are below this, in bytes.
const STRIDE: u64 = 1 << 40;

/// A view as a tensor map describes it. What of it lies where, and its boxes, were found to be as the Tensor Memory
/// Accelerator asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tensor {
    address: u64,
    place: Place,
    tile: Tile,
}

impl Tensor {
    pub(crate) fn new(address: u64, place: Place, tile: Tile) -> Self {
        Self { address, place, tile }
    }

    /// The device's address of its first element.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The extents in elements, slowest dimension first.
    pub fn extents(&self) -> &[u64] {
        self.place.extents()
    }

    /// The strides in bytes of all dimensions but the last, slowest first.
    pub fn strides(&self) -> &[u64] {
        self.place.strides()
    }

    /// Has it no elements? Then no map can be made of it, but of what is [there](Self::there) in its place.
    pub fn is_empty(&self) -> bool {
        self.extents().contains(&0)
    }

    /// One element in the place of none: of [`NOTHING`](vm_abi::NOTHING), which begins at this address.
    #[must_use]
    pub fn there(&self, nothing: u64) -> Self {
        let address = nothing + if self.tile.writes { u64::from(NOTHING_BYTES) / 2 } else { 0 };
        let rank = self.extents().len();
        let place = Place::new(self.tile.element.bytes(), &[1; MAX_RANK][..rank], &[UNIT; MAX_RANK][1..rank]);
        Self { address, place, tile: self.tile }
    }

    /// Its boxes.
    pub fn tile(&self) -> &Tile {
        &self.tile
    }

    /// That a tensor map can be made of it, or what is in its place.
    ///
    /// # Errors
    /// What it has, and what it needs.
    pub(crate) fn check(&self) -> Result<(), String> {
        let needs = |has: String, needed: String| {
            Err(format!("it is copied by a tensor map: {has}, {needed} needed"))
        };
        if self.is_empty() {
            return Ok(());
        }
        if !self.address.is_multiple_of(UNIT) {
            return needs(format!("its address is {:#x}", self.address), format!("a multiple of {UNIT} is"));
        }
        for (dimension, extent) in self.extents().iter().enumerate() {
            if !(1..=EXTENT).contains(extent) {
                return needs(
                    format!("extent {extent} of dimension {dimension}"),
                    format!("1 to {EXTENT} are"),
                );
            }
        }
        for (dimension, stride) in self.strides().iter().enumerate() {
            if !stride.is_multiple_of(UNIT) || *stride >= STRIDE {
                let needed = format!("a multiple of {UNIT} below {STRIDE} is");
                return needs(format!("a stride of {stride} bytes of dimension {dimension}"), needed);
            }
        }
        Ok(())
    }
}

/// That a kernel with these parameters can have boxes.
///
/// # Errors
/// What they have, and what they need.
pub(crate) fn check_tile(tile: &Tile, parameters: &[Parameter]) -> Result<(), String> {
    let Some(Parameter { name, kind }) = parameters.get(tile.parameter as usize) else {
        return Err(format!("a box of parameter {}, of {}", tile.parameter, parameters.len()));
    };
    let ParameterKind::View { extents, element, writes, .. } = kind else {
        return Err(format!("a box of {name}, which is no view"));
    };
    if tile.writes && !writes {
        return Err(format!("boxes are copied to the view {name}, which is not written"));
    }
    let bad = |what: String| Err(format!("the boxes of the view {name} have {what}"));
    let [rows, columns] = tile.shape;
    if tile.element.bytes() != element.bytes() {
        return bad(format!("elements of {}, the view of {element}", tile.element));
    }
    if !(1..=BOX).contains(&rows) || !(1..=BOX).contains(&columns) {
        return bad(format!("{rows} rows and {columns} columns, 1 to {BOX} of each can be copied"));
    }
    if extents.len() == 1 && rows != 1 {
        return bad(format!("{rows} rows, a view of one dimension has 1"));
    }
    let bytes = tile.row_bytes();
    if !bytes.is_multiple_of(UNIT) {
        return bad(format!("rows of {bytes} bytes, a multiple of {UNIT} is needed"));
    }
    if tile.swizzle == Swizzle::Bytes128 && bytes > SWIZZLED {
        return bad(format!("rows of {bytes} bytes, the swizzle takes up to {SWIZZLED}"));
    }
    Ok(())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use vm_abi::Element;

    use super::*;
    use crate::artifact::{Artifact, Extent, Signature};
    use crate::error::Result;
    use crate::extents::Extents;
    use crate::launch::{Arguments, QueueArgument};
    use crate::memory::{Memory, MemoryKind};

    fn artifact(kinds: Vec<ParameterKind>, tiles: Vec<Tile>, guarded: bool) -> Result<Artifact> {
        let parameters = (0..).zip(kinds).map(|(index, kind)| Parameter { name: format!("p{index}"), kind });
        let signature = Signature {
            entry: "k".into(),
            block: [1; 3],
            cluster: 1,
            shared_bytes: 0,
            parameters: parameters.collect(),
            tiles,
            guarded,
            cost_bound: u64::MAX,
        };
        // SAFETY: it is never run.
        #[allow(unsafe_code)]
        unsafe {
            Artifact::new([], signature)
        }
    }

    fn memory(address: u64, bytes: u64) -> Memory {
        // SAFETY: nobody reaches it.
        #[allow(unsafe_code)]
        unsafe {
            Memory::from_raw(MemoryKind::Device, address, 0, bytes)
        }
    }

    /// An artifact of one view of `f16` with a box.
    fn boxed(rank: usize, shape: [u32; 2], swizzle: Swizzle) -> Result<Artifact> {
        let kind = ParameterKind::View {
            extents: vec![Extent::Any; rank],
            element: Element::F16,
            align: 2,
            writes: false,
        };
        artifact(
            vec![kind],
            vec![Tile { parameter: 0, shape, swizzle, element: Element::F16, writes: false }],
            false,
        )
    }

    #[test]
    fn boxes_that_can_not_be_copied_are_refused() {
        let check = |rank, shape, swizzle, want: Option<&str>| {
            let got = boxed(rank, shape, swizzle).err().map(|error| error.to_string());
            assert_eq!(got.is_some(), want.is_some(), "{shape:?} {swizzle:?}: {got:?}");
            assert!(got.as_deref().unwrap_or_default().contains(want.unwrap_or_default()), "{got:?}");
        };
        check(2, [256, 64], Swizzle::Bytes128, None);
        check(2, [256, 256], Swizzle::None, None);
        check(4, [1, 8], Swizzle::None, None);
        check(1, [1, 8], Swizzle::None, None);
        check(1, [2, 8], Swizzle::None, Some("the view p0 have 2 rows, a view of one dimension has 1"));
        check(2, [257, 8], Swizzle::None, Some("257 rows and 8 columns, 1 to 256"));
        check(2, [0, 8], Swizzle::None, Some("0 rows"));
        check(2, [8, 12], Swizzle::None, Some("rows of 24 bytes, a multiple of 16 is needed"));
        check(2, [8, 72], Swizzle::Bytes128, Some("rows of 144 bytes, the swizzle takes up to 128"));
        let tile = |parameter, element| Tile {
            parameter,
            shape: [8, 8],
            swizzle: Swizzle::None,
            element,
            writes: false,
        };
        let check = |tile, want: &str| {
            let view = ParameterKind::View {
                extents: vec![Extent::Any; 2],
                element: Element::F16,
                align: 2,
                writes: false,
            };
            let number = ParameterKind::Scalar { bytes: 2, range: None };
            let got = artifact(vec![view, number], vec![tile], false);
            let got = got.unwrap_err().to_string();
            assert!(got.contains(want), "{got}");
        };
        check(tile(2, Element::F16), "a box of parameter 2, of 2");
        check(tile(1, Element::F16), "a box of p1, which is no view");
        check(tile(0, Element::F32), "elements of f32, the view of f16");
    }

    #[test]
    fn views_that_can_not_be_copied_by_a_tensor_map_are_refused() {
        let memory = memory(0x1_0000, 1 << 50);
        let check = |from, extents: &[u64], strides: &[u64], want: Option<&str>| {
            let artifact = boxed(extents.len(), [1, 8], Swizzle::None).unwrap();
            let region = memory.region().slice(from, memory.bytes() - from).unwrap();
            let view = QueueArgument::View(region, Extents::strided(extents, strides).unwrap());
            let got = Arguments::new(&artifact, [view]).err().map(|error| error.to_string());
            assert_eq!(got.is_some(), want.is_some(), "{extents:?} {strides:?}: {got:?}");
            assert!(got.as_deref().unwrap_or_default().contains(want.unwrap_or_default()), "{got:?}");
        };
        check(16, &[3, 5], &[16], None);
        check(16, &[2, 3, 5], &[48, 16], None);
        check(16, &[5], &[], None);
        check(
            8,
            &[3, 5],
            &[16],
            Some("p0: it is copied by a tensor map: its address is 0x10008, a multiple of 16"),
        );
        check(0, &[3, 5], &[24], Some("a stride of 24 bytes of dimension 0, a multiple of 16 below"));
        check(0, &[3, 5], &[1 << 40], Some("a stride of 1099511627776 bytes"));
        check(2, &[0, 5], &[24], None);
        check(0, &[1, 1 << 31], &[16], Some("extent 2147483648 of dimension 1"));
        check(0, &[1, (1 << 31) - 64], &[16], None);
    }

    #[test]
    fn what_has_no_elements_is_made_of_what_is_there() {
        for (writes, address) in [(false, 0x100), (true, 0x140)] {
            let tile =
                Tile { parameter: 0, shape: [8, 8], swizzle: Swizzle::None, element: Element::F16, writes };
            for (extents, strides) in [(&[0][..], &[][..]), (&[4, 0], &[8]), (&[2, 0, 5], &[24, 8])] {
                let tensor = Tensor::new(0x3002, Place::new(2, extents, strides), tile);
                assert!(tensor.is_empty());
                let there = tensor.there(0x100);
                assert_eq!((there.address(), there.tile()), (address, &tile));
                assert!(there.extents().iter().all(|extent| *extent == 1) && there.check() == Ok(()));
                assert_eq!([there.extents().len(), there.strides().len() + 1], [extents.len(); 2]);
            }
        }
    }

    #[test]
    fn tensor_maps_are_made_of_what_was_packed() {
        let view = |rank| ParameterKind::View {
            extents: vec![Extent::Any; rank],
            element: Element::F16,
            align: 16,
            writes: false,
        };
        let tile = |parameter, shape| Tile {
            parameter,
            shape,
            swizzle: Swizzle::Bytes128,
            element: Element::F16,
            writes: false,
        };
        let kinds = vec![ParameterKind::Scalar { bytes: 4, range: None }, view(2), view(3)];
        let tiles = vec![tile(2, [64, 64]), tile(1, [128, 32])];
        let artifact = artifact(kinds, tiles.clone(), true).unwrap();
        assert_eq!((artifact.params().align(), artifact.parameter_bytes()), (64, 256 + 8 + 32 + 48 + 16));
        let (one, other) = (memory(0x1000, 0x1000), memory(0x2000, 0x1000));
        let given = [
            QueueArgument::Scalar(7u32.into()),
            QueueArgument::View(one.region(), Extents::packed(&[4, 8]).unwrap()),
            QueueArgument::View(other.region(), Extents::strided(&[2, 3, 5], &[64, 16]).unwrap()),
        ];
        let packed = Arguments::new(&artifact, given).unwrap();
        assert_eq!(packed.words()[..32], [0; 32]);
        let mut seen = Vec::new();
        let whole = packed.with_maps(&artifact, |tensor| {
            seen.push((
                tensor.address(),
                tensor.extents().to_vec(),
                tensor.strides().to_vec(),
                *tensor.tile(),
            ));
            Ok([seen.len() as u64; 16])
        });
        let whole = whole.unwrap().unwrap();
        let first = (0x2000, vec![2, 3, 5], vec![64, 16], tiles[0]);
        assert_eq!(seen, [first, (0x1000, vec![4, 8], vec![16], tiles[1])]);
        assert_eq!(whole.words()[..32], [[1; 16], [2; 16]].concat());
        assert_eq!(
            (whole.words()[32..].to_vec(), whole.bytes()),
            (packed.words()[32..].to_vec(), packed.bytes())
        );
    }
}
