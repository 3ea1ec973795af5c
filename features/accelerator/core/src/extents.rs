//! What of a view a kernel is given: how many elements in each dimension, and how far apart.

use vm_abi::{MAX_EXTENT, MAX_RANK};

use crate::artifact::Extent;
use crate::error::{Error, Result};

/// The extents of a view and the strides between its rows, as a caller gives them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extents {
    rank: u8,
    strided: bool,
    extents: [u64; MAX_RANK],
    strides: [u64; MAX_RANK - 1],
}

impl Extents {
    /// All that the bytes hold: the kernel's parameter must fix every extent but the slowest, which follows from the
    /// number of bytes. For a view of one dimension that is always so.
    pub const WHOLE: Self =
        Self { rank: 0, strided: false, extents: [0; MAX_RANK], strides: [0; MAX_RANK - 1] };

    /// Extents in elements, slowest dimension first, one row behind the other.
    ///
    /// # Errors
    /// [`Error::Extents`] for a number of dimensions that no view has.
    pub fn packed(extents: &[u64]) -> Result<Self> {
        if !(1..=MAX_RANK).contains(&extents.len()) {
            let reason = format!("a view has 1 to {MAX_RANK} dimensions, not {}", extents.len());
            return Err(Error::Extents { reason });
        }
        let mut this = Self { rank: extents.len() as u8, ..Self::WHOLE };
        this.extents[..extents.len()].copy_from_slice(extents);
        Ok(this)
    }

    /// Extents in elements, and for each dimension but the last the bytes from one of its elements to the next.
    ///
    /// # Errors
    /// [`Error::Extents`] for numbers of dimensions that do not fit.
    pub fn strided(extents: &[u64], strides: &[u64]) -> Result<Self> {
        let mut this = Self::packed(extents)?;
        if strides.len() + 1 != extents.len() {
            let reason = format!(
                "{} extents need {} strides, not {}: the last dimension has none",
                extents.len(),
                extents.len() - 1,
                strides.len()
            );
            return Err(Error::Extents { reason });
        }
        this.strided = true;
        this.strides[..strides.len()].copy_from_slice(strides);
        Ok(this)
    }

    /// The extents and strides for a parameter, of which all hold that packing promises: as many dimensions as it has,
    /// extents that it admits, all within `bytes` bytes.
    ///
    /// # Errors
    /// What does not fit, in words.
    pub(crate) fn resolve(
        &self,
        wanted: &[Extent],
        element: u32,
        align: u32,
        bytes: u64,
    ) -> Result<Place, String> {
        let rank = wanted.len();
        let (element, align) = (u64::from(element), u64::from(align));
        let mut place = Place { rank, element, extents: self.extents, strides: self.strides };
        if self.rank == 0 {
            place.fill_whole(wanted, bytes)?;
        } else if usize::from(self.rank) != rank {
            return Err(format!("a view of {rank} dimensions is wanted, one of {} was given", self.rank));
        }
        let extents = &place.extents[..rank];
        for (dimension, (&extent, wanted)) in extents.iter().zip(wanted).enumerate() {
            if extent > MAX_EXTENT {
                return Err(format!("extent {extent} of dimension {dimension} is over {MAX_EXTENT}"));
            }
            if !wanted.admits(extent) {
                let wanted = match wanted {
                    Extent::Fixed(fixed) => format!("{fixed}"),
                    Extent::Multiple(number) => format!("a multiple of {number}"),
                    Extent::Any | Extent::Same { .. } => "any number".into(),
                };
                return Err(format!("extent {extent} of dimension {dimension} is not {wanted}"));
            }
        }
        if !self.strided {
            place.pack(align).ok_or("its elements are more than can be addressed")?;
        }
        if let Some((dimension, stride)) =
            place.strides[..rank - 1].iter().enumerate().find(|(_, stride)| !stride.is_multiple_of(align))
        {
            return Err(format!("stride {stride} of dimension {dimension} is no multiple of {align} bytes"));
        }
        match place.bytes() {
            Some(needed) if needed <= bytes => Ok(place),
            Some(needed) => {
                Err(format!("its extents reach over {needed} bytes, the buffer's part has {bytes}"))
            }
            None => Err("its elements are more than can be addressed".into()),
        }
    }
}

/// Extents and strides that fit a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    rank: usize,
    element: u64,
    extents: [u64; MAX_RANK],
    strides: [u64; MAX_RANK - 1],
}

impl Place {
    /// Extents and strides that were found to fit.
    pub(crate) fn new(element: u32, extents: &[u64], strides: &[u64]) -> Self {
        let mut place = Self {
            rank: extents.len(),
            element: u64::from(element),
            extents: [0; MAX_RANK],
            strides: [0; MAX_RANK - 1],
        };
        place.extents[..extents.len()].copy_from_slice(extents);
        place.strides[..strides.len()].copy_from_slice(strides);
        place
    }

    pub(crate) fn extents(&self) -> &[u64] {
        &self.extents[..self.rank]
    }

    pub(crate) fn strides(&self) -> &[u64] {
        &self.strides[..self.rank - 1]
    }

    fn fill_whole(&mut self, wanted: &[Extent], bytes: u64) -> Result<(), String> {
        let mut row = self.element;
        for (dimension, extent) in wanted.iter().enumerate().skip(1) {
            let Extent::Fixed(fixed) = *extent else {
                return Err(format!(
                    "extent {dimension} of {} is open: give the view's extents with `shaped`",
                    self.rank
                ));
            };
            self.extents[dimension] = fixed;
            row = row.checked_mul(fixed).ok_or("its rows are longer than can be addressed")?;
        }
        if row == 0 || !bytes.is_multiple_of(row) {
            return Err(format!("{bytes} bytes are no whole number of rows of {row} bytes"));
        }
        self.extents[0] = bytes / row;
        Ok(())
    }

    /// Sets the strides of rows that lie one behind the other. Where there is at most one, its stride is free to be
    /// aligned.
    fn pack(&mut self, align: u64) -> Option<()> {
        let mut row = self.element;
        for dimension in (1..self.rank).rev() {
            row = row.checked_mul(self.extents[dimension])?;
            let single = self.extents[dimension - 1] <= 1;
            self.strides[dimension - 1] = if single { row.checked_next_multiple_of(align)? } else { row };
        }
        Some(())
    }

    /// The bytes from the first element to the end of the last; `None` if they are too many for an address.
    pub(crate) fn bytes(&self) -> Option<u64> {
        if self.extents().contains(&0) {
            return Some(0);
        }
        let last = self.extents[self.rank - 1].checked_mul(self.element)?;
        self.extents()
            .iter()
            .zip(self.strides())
            .try_fold(last, |sum, (&extent, &stride)| sum.checked_add((extent - 1).checked_mul(stride)?))
    }

    /// Whether no byte belongs to two elements, as far as is seen by looking at one dimension after the other.
    pub(crate) fn distinct(&self) -> bool {
        if self.extents().contains(&0) {
            return true;
        }
        // Each dimension must step over all that the faster ones reach; a dimension of one element takes no step.
        let mut steps = [(u64::MAX, 1); MAX_RANK - 1];
        for (step, (&extent, &stride)) in steps.iter_mut().zip(self.extents().iter().zip(self.strides())) {
            if extent > 1 {
                *step = (stride, extent);
            }
        }
        steps.sort_unstable();
        let mut reach = self.extents[self.rank - 1] * self.element;
        for (stride, extent) in steps.into_iter().filter(|(_, extent)| *extent > 1) {
            if stride < reach {
                return false;
            }
            reach += (extent - 1) * stride;
        }
        true
    }

    /// The bytes of a row, and the distance of which the starts of all rows are multiples; 0 for a single row. Dimensions that lie
    /// one behind the other without a gap, as the heads of a token, are one row.
    fn rows(&self) -> (u64, u64) {
        let mut row = self.extents[self.rank - 1].saturating_mul(self.element);
        // A dimension of one element, or of no stride, goes nowhere.
        let mut steps = [(u64::MAX, 0); MAX_RANK - 1];
        for (step, (&extent, &stride)) in steps.iter_mut().zip(self.extents().iter().zip(self.strides())) {
            if extent > 1 && stride > 0 {
                *step = (stride, extent);
            }
        }
        steps.sort_unstable();
        let mut steps = steps.iter().filter(|(_, extent)| *extent > 0).peekable();
        while let Some((_, extent)) = steps.next_if(|(stride, _)| *stride == row) {
            row = row.saturating_mul(*extent);
        }
        let mut strides = steps.map(|(stride, _)| *stride);
        let Some(pitch) = strides.next() else { return (row, 0) };
        (row, if strides.all(|stride| stride.is_multiple_of(pitch)) { pitch } else { 1 })
    }

    /// Whether this view at one address and another view at another share no byte, as far as is seen easily: their
    /// bytes lie apart, or their rows pass each other, as columns of one matrix do.
    pub(crate) fn apart(&self, at: u64, other: &Self, other_at: u64) -> bool {
        let (bytes, other_bytes) = (self.bytes().unwrap_or(u64::MAX), other.bytes().unwrap_or(u64::MAX));
        if bytes == 0 || other_bytes == 0 {
            return true;
        }
        if at.saturating_add(bytes) <= other_at || other_at.saturating_add(other_bytes) <= at {
            return true;
        }
        let ((row, pitch), (other_row, other_pitch)) = (self.rows(), other.rows());
        let pitch = match (pitch, other_pitch) {
            (0, pitch) | (pitch, 0) => pitch,
            (pitch, other) if pitch == other => pitch,
            _ => return false,
        };
        // Where the rows begin, on a circle of one pitch.
        pitch != 0
            && row.saturating_add(other_row) <= pitch
            && distance(at, other_at, pitch) >= row
            && distance(other_at, at, pitch) >= other_row
    }
}

/// How far `to` lies behind `from` on a circle of `pitch`.
fn distance(from: u64, to: u64, pitch: u64) -> u64 {
    (to % pitch + pitch - from % pitch) % pitch
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// Every byte of a place's elements, and how often it is one's.
    fn bytes_of(place: &Place, at: u64) -> (BTreeSet<u64>, bool) {
        let mut bytes = BTreeSet::new();
        let mut twice = false;
        let count: u64 = place.extents().iter().product();
        for number in 0..count {
            let mut left = number;
            let mut address = at;
            for (dimension, extent) in place.extents().iter().enumerate().rev() {
                let stride = place.strides().get(dimension).copied().unwrap_or(place.element);
                address += left % extent * stride;
                left /= extent;
            }
            (address..address + place.element).for_each(|byte| twice |= !bytes.insert(byte));
        }
        (bytes, twice)
    }

    fn place() -> impl Strategy<Value = Place> {
        (1usize..=4, prop::sample::select(vec![1u32, 2, 4])).prop_flat_map(|(rank, element)| {
            let extents = prop::collection::vec(0u64..5, rank);
            let strides =
                prop::collection::vec((0u64..20).prop_map(move |n| n * u64::from(element)), rank - 1);
            (extents, strides).prop_map(move |(extents, strides)| Place::new(element, &extents, &strides))
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn a_place_reaches_just_its_bytes(place in place()) {
            let (bytes, twice) = bytes_of(&place, 0);
            prop_assert_eq!(place.bytes(), Some(bytes.last().map_or(0, |last| last + 1)));
            prop_assert!(!place.distinct() || !twice, "{place:?} has elements that overlap");
        }

        #[test]
        fn places_that_are_apart_share_no_byte(one in place(), other in place(), at in 0u64..200, other_at in 0u64..200) {
            let apart = one.apart(at, &other, other_at);
            prop_assert_eq!(apart, other.apart(other_at, &one, at));
            let common = bytes_of(&one, at).0.intersection(&bytes_of(&other, other_at).0).count();
            prop_assert!(!apart || common == 0, "{one:?} at {at} and {other:?} at {other_at}");
        }

        #[test]
        fn packed_rows_lie_one_behind_the_other(extents in prop::collection::vec(0u64..6, 1..=4)) {
            let wanted = vec![Extent::Any; extents.len()];
            let bytes = 4 * extents.iter().product::<u64>();
            let place = Extents::packed(&extents).unwrap().resolve(&wanted, 4, 4, bytes).unwrap();
            prop_assert_eq!(place.bytes(), Some(bytes));
            prop_assert!(place.distinct());
            if bytes > 0 {
                prop_assert!(Extents::packed(&extents).unwrap().resolve(&wanted, 4, 4, bytes - 1).is_err());
            }
        }
    }

    #[test]
    fn columns_of_one_matrix_are_apart_and_its_overlapping_parts_are_not() {
        let columns = |count: u64| Place::new(4, &[10, count], &[400]);
        let check = |(left, at): (u64, u64), (right, other_at): (u64, u64), apart: bool| {
            assert_eq!(columns(left).apart(4 * at, &columns(right), 4 * other_at), apart);
        };
        check((50, 0), (50, 50), true);
        check((50, 0), (50, 49), false);
        check((50, 50), (50, 100), true);
        check((50, 50), (51, 100), false);
        check((100, 0), (1, 99), false);
        let row = |count| Place::new(4, &[count], &[]);
        assert!(row(50).apart(0, &columns(50), 200));
        assert!(!row(51).apart(0, &columns(50), 200));
        let planes = Place::new(4, &[3, 10, 50], &[4000, 400]);
        assert!(planes.apart(0, &columns(50), 200));
        assert!(!Place::new(4, &[3, 10, 50], &[4100, 400]).apart(0, &columns(50), 200), "not seen easily");
        // A stride of 0 beside one that steps: bytes 133 and 150, of which 150 is in the other's last row.
        assert!(!Place::new(1, &[2, 2, 1], &[0, 17]).apart(133, &Place::new(2, &[4, 4], &[38]), 29));
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        use Extent::{Any, Fixed, Multiple};
        let check = |given: Result<Extents>,
                     wanted: &[Extent],
                     align: u32,
                     bytes: u64,
                     want: Result<&[u64], &str>| {
            let got = given.unwrap().resolve(wanted, 4, align, bytes);
            match (&got, want) {
                (Ok(place), Ok(words)) => {
                    let all: Vec<_> = place.extents().iter().chain(place.strides()).copied().collect();
                    assert_eq!(all, words);
                }
                (Err(reason), Err(part)) => assert!(reason.contains(part), "{reason}: {part}"),
                (got, want) => panic!("{got:?}, {want:?}"),
            }
        };
        let whole = || Ok(Extents::WHOLE);
        check(whole(), &[Any], 4, 40, Ok(&[10]));
        check(whole(), &[Any], 4, 0, Ok(&[0]));
        check(whole(), &[Any], 4, 42, Err("no whole number of rows"));
        check(whole(), &[Multiple(4)], 4, 40, Err("a multiple of 4"));
        check(whole(), &[Fixed(10)], 4, 40, Ok(&[10]));
        check(whole(), &[Fixed(9)], 4, 40, Err("is not 9"));
        check(whole(), &[Any, Fixed(5)], 4, 40, Ok(&[2, 5, 20]));
        check(whole(), &[Any, Any], 4, 40, Err("open"));
        check(whole(), &[Any, Fixed(0)], 4, 40, Err("rows of 0"));
        check(whole(), &[Any, Fixed(1 << 40), Fixed(1 << 40)], 4, 40, Err("longer than can be addressed"));
        let packed = Extents::packed;
        check(packed(&[2, 5]), &[Any, Any], 4, 40, Ok(&[2, 5, 20]));
        check(packed(&[2, 5]), &[Any, Any], 4, 1000, Ok(&[2, 5, 20]));
        check(packed(&[2, 5]), &[Any, Any], 4, 39, Err("reach over 40 bytes"));
        check(packed(&[2, 5]), &[Any, Any], 16, 40, Err("no multiple of 16"));
        check(packed(&[1, 5]), &[Any, Any], 16, 20, Ok(&[1, 5, 32]));
        check(packed(&[2, 5]), &[Any], 4, 40, Err("1 dimensions"));
        check(packed(&[MAX_EXTENT + 1]), &[Any], 4, u64::MAX, Err("over"));
        check(packed(&[MAX_EXTENT, MAX_EXTENT]), &[Any, Any], 4, u64::MAX, Err("more than can be addressed"));
        check(packed(&[MAX_EXTENT, MAX_EXTENT, 0]), &[Any; 3], 4, 0, Ok(&[MAX_EXTENT, MAX_EXTENT, 0, 0, 0]));
        let strided = Extents::strided;
        check(strided(&[3, 2], &[16]), &[Any, Any], 16, 40, Ok(&[3, 2, 16]));
        check(strided(&[3, 2], &[16]), &[Any, Any], 16, 39, Err("reach over 40"));
        check(strided(&[3, 2], &[12]), &[Any, Any], 8, 40, Err("no multiple of 8"));
        check(strided(&[3, 2], &[!3]), &[Any, Any], 4, u64::MAX, Err("more than can be addressed"));
        for bad in [packed(&[]), packed(&[1; 5]), strided(&[1, 2], &[]), strided(&[1], &[4])] {
            assert!(matches!(bad, Err(Error::Extents { .. })), "{bad:?}");
        }
    }
}
