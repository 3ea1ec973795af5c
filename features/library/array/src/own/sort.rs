//! Sorting along an axis.

use super::radix;
use crate::dtype::{DType, Kind};
use crate::error::{Error, Result};
use crate::layout;
use crate::node::Array;

impl Array {
    pub(super) fn sortable(&self, function: &'static str) -> Result<()> {
        match self.dtype().is_complex() {
            true => Err(Error::Type { function, dtype: self.dtype(), what: "it takes real numbers" }),
            false => Ok(()),
        }
    }

    /// The elements along an axis in order, and where each was, an `Int64`; equal ones stay in theirs.
    ///
    /// # Errors
    /// [`Error::Type`] for complex numbers, [`Error::Value`] for an axis that there is not.
    pub fn sort(&self, axis: i64, descending: bool) -> Result<(Array, Array)> {
        match self.sorted_along(axis, descending, true)? {
            (elements, Some(places)) => Ok((elements, places.cast(DType::Int64)?)),
            (elements, None) => {
                let places = Array::full(self.device(), DType::Int64, self.shape(), crate::Number::Int(0))?;
                Ok((elements, places))
            }
        }
    }

    /// The elements along an axis in order alone, which takes less than [`sort`](Array::sort).
    ///
    /// # Errors
    /// As [`sort`](Array::sort).
    pub fn sorted(&self, axis: i64, descending: bool) -> Result<Array> {
        Ok(self.sorted_along(axis, descending, false)?.0)
    }

    /// Both; no places where each is the only one along the axis.
    fn sorted_along(&self, axis: i64, descending: bool, with_places: bool) -> Result<(Array, Option<Array>)> {
        self.sortable("sort")?;
        let axis = layout::axis("sort", axis, self.ndim())?;
        if self.size() == 0 || self.shape()[axis] == 1 {
            return Ok((self.clone(), None));
        }
        let mut order: Vec<i64> = (0..self.ndim() as i64).filter(|d| *d != axis as i64).collect();
        order.push(axis as i64);
        let mut back = vec![0; order.len()];
        order.iter().zip(0..).for_each(|(from, to)| back[*from as usize] = to);
        let turned = self.permute(&order)?;
        let (elements, places) = match self.device().is_sequential() {
            true => sorted_by_host(&turned, descending).map(|(elements, places)| (elements, Some(places)))?,
            false => radix::sorted(&turned, descending, with_places)?,
        };
        Ok((elements.permute(&back)?, places.map(|places| places.permute(&back)).transpose()?))
    }
}

/// The rows of an array in order, sorted where their memory is the host's own.
fn sorted_by_host(rows: &Array, descending: bool) -> Result<(Array, Array)> {
    let (device, dtype) = (rows.device(), rows.dtype());
    let bytes = rows.to_bytes()?;
    let size = dtype.bytes() as usize;
    let n = rows.shape().last().map_or(1, |n| (*n as usize).max(1));
    let mut keys = Vec::with_capacity(bytes.len());
    let mut places = Vec::with_capacity(bytes.len() / size * 8);
    for row in bytes.chunks_exact(n * size) {
        let rank = |bytes: &[u8]| if descending { !rank(dtype, bytes) } else { rank(dtype, bytes) };
        let mut order: Vec<(u64, u64)> = row.chunks_exact(size).map(rank).zip(0..).collect();
        order.sort_unstable();
        for (_, place) in order {
            keys.extend_from_slice(&row[place as usize * size..][..size]);
            places.extend_from_slice(&place.to_le_bytes());
        }
    }
    let keys = Array::from_bytes(device, dtype, rows.shape(), &keys)?;
    Ok((keys, Array::from_bytes(device, DType::Int64, rows.shape(), &places)?))
}

/// An integer that is less where an element is; both zeros are equal, and NaN is above all.
fn rank(dtype: DType, bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word[8 - bytes.len()..].copy_from_slice(bytes);
    let bits = u64::from_le_bytes(word);
    let top = 1 << 63;
    match dtype.kind() {
        Kind::Signed => bits ^ top,
        Kind::Float => match crate::Number::from_bytes(dtype, bytes) {
            crate::Number::Float(value) if value.is_nan() => u64::MAX,
            crate::Number::Float(0.0) => top,
            _ if bits & top != 0 => !bits,
            _ => bits | top,
        },
        _ => bits,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_in_the_elements_order() {
        let check = |dtype: DType, elements: &[f64]| {
            let ranks: Vec<u64> = elements
                .iter()
                .map(|value| {
                    let bits = crate::Number::Float(*value).bits(dtype)[0].to_le_bytes();
                    rank(dtype, &bits[..dtype.bytes() as usize])
                })
                .collect();
            for (pair, ranks) in elements.windows(2).zip(ranks.windows(2)) {
                let expected = if pair[0] == pair[1] { ranks[0] == ranks[1] } else { ranks[0] < ranks[1] };
                assert!(expected, "{dtype}: {pair:?} have the ranks {ranks:x?}");
            }
        };
        let floats = [f64::NEG_INFINITY, -2.5, -1.0, -0.0, 0.0, 0.5, 3.0, f64::INFINITY, f64::NAN];
        for dtype in [DType::Float16, DType::BFloat16, DType::Float32, DType::Float64] {
            check(dtype, &floats);
        }
        for dtype in [DType::Int8, DType::Int16, DType::Int32, DType::Int64] {
            check(dtype, &[-128.0, -1.0, 0.0, 1.0, 127.0]);
        }
        for dtype in [DType::Bool, DType::UInt8, DType::UInt16, DType::UInt32, DType::UInt64] {
            check(dtype, &[0.0, 1.0]);
        }
        check(DType::UInt8, &[1.0, 127.0, 128.0, 255.0]);
    }
}
