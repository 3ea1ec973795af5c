//! `CUDA_MEMCPY2D` and `CUDA_MEMCPY3D` as words.

/// Memory of the host.
pub const HOST: u64 = 1;
/// Memory of a device.
pub const DEVICE: u64 = 2;
/// An array.
pub const ARRAY: u64 = 3;
/// Either, as its address says.
pub const UNIFIED: u64 = 4;

/// Which of the two.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Form {
    /// `CUDA_MEMCPY2D`.
    Two,
    /// `CUDA_MEMCPY3D`.
    Three,
    /// `CUDA_MEMCPY3D_PEER`: the same, of which each end has a context.
    Peer,
}

/// Where an end's words are.
#[derive(Clone, Copy, Debug)]
pub struct End {
    /// Where it begins in each direction; the last is missing of two.
    pub origin: [Option<usize>; 3],
    /// What it is: the lower half of the word.
    pub kind: usize,
    /// An address of the host.
    pub host: usize,
    /// An address of a device.
    pub device: usize,
    /// An array.
    pub array: usize,
    /// The context that it is of, between peers.
    pub context: Option<usize>,
    /// Bytes of a row.
    pub pitch: usize,
    /// Rows of a layer; missing of two.
    pub height: Option<usize>,
}

impl Form {
    /// Words of the structure.
    #[must_use]
    pub fn words(self) -> usize {
        match self {
            Self::Two => 16,
            Self::Three | Self::Peer => 25,
        }
    }

    /// Source and target.
    #[must_use]
    pub fn ends(self) -> [End; 2] {
        match self {
            Self::Two => [0, 7].map(|at| End {
                origin: [Some(at), Some(at + 1), None],
                kind: at + 2,
                host: at + 3,
                device: at + 4,
                array: at + 5,
                context: None,
                pitch: at + 6,
                height: None,
            }),
            Self::Three | Self::Peer => [0, 11].map(|at| End {
                origin: [Some(at), Some(at + 1), Some(at + 2)],
                kind: at + 4,
                host: at + 5,
                device: at + 6,
                array: at + 7,
                context: (self == Self::Peer).then_some(at + 8),
                pitch: at + 9,
                height: Some(at + 10),
            }),
        }
    }

    /// Bytes of a row, rows, layers.
    #[must_use]
    pub fn size(self, words: &[u64]) -> [u64; 3] {
        match self {
            Self::Two => [words[14], words[15], 1],
            Self::Three | Self::Peer => [words[22], words[23], words[24]],
        }
    }

    /// Sets these.
    pub fn resize(self, words: &mut [u64], size: [u64; 3]) {
        match self {
            Self::Two => words[14..16].copy_from_slice(&size[..2]),
            Self::Three | Self::Peer => words[22..25].copy_from_slice(&size),
        }
    }

    /// The same copy as a `CUDA_MEMCPY3D`; of one between peers without its contexts.
    #[must_use]
    pub fn to_three(self, words: &[u64]) -> Vec<u64> {
        let mut copy = vec![0; Self::Three.words()];
        for (old, new) in self.ends().into_iter().zip(Self::Three.ends()) {
            for (old, new) in old.origin.iter().zip(new.origin) {
                if let (Some(old), Some(new)) = (old, new) {
                    copy[new] = words[*old];
                }
            }
            for (old, new) in [
                (Some(old.kind), new.kind),
                (Some(old.host), new.host),
                (Some(old.device), new.device),
                (Some(old.array), new.array),
                (Some(old.pitch), new.pitch),
                (old.height, new.height.unwrap_or(new.pitch + 1)),
            ] {
                copy[new] = old.map_or(0, |old| words[old]);
            }
        }
        Self::Three.resize(&mut copy, self.size(words));
        copy
    }

    fn end(self, is_target: bool) -> End {
        self.ends()[usize::from(is_target)]
    }

    /// Bytes of a row and of a layer of an end, where they are not said as they are needed.
    fn strides(self, words: &[u64], is_target: bool) -> Option<[u64; 2]> {
        let (end, size) = (self.end(is_target), self.size(words));
        let pitch = if words[end.pitch] == 0 { size[0] } else { words[end.pitch] };
        let height = end.height.map_or(0, |height| if words[height] == 0 { size[1] } else { words[height] });
        Some([pitch, pitch.checked_mul(height)?])
    }

    /// How far a place of the copy is behind an end's address.
    #[must_use]
    pub fn offset(self, words: &[u64], is_target: bool, place: [u64; 3]) -> Option<u64> {
        let (end, [pitch, layer]) = (self.end(is_target), self.strides(words, is_target)?);
        let at = |side: usize| end.origin[side].map_or(0, |at| words[at]).checked_add(place[side]);
        let rows = at(1)?.checked_mul(pitch)?;
        at(2)?.checked_mul(layer)?.checked_add(rows)?.checked_add(at(0)?)
    }

    /// How many bytes behind an end's address the copy reaches.
    #[must_use]
    pub fn extent(self, words: &[u64], is_target: bool) -> Option<u64> {
        let [width, height, depth] = self.size(words);
        if width == 0 || height == 0 || depth == 0 {
            return Some(0);
        }
        self.offset(words, is_target, [0, height - 1, depth - 1])?.checked_add(width)
    }

    /// Makes an end begin where its address is, with rows and layers without gaps.
    pub fn pack(self, words: &mut [u64], is_target: bool) {
        let (end, size) = (self.end(is_target), self.size(words));
        end.origin.iter().flatten().for_each(|at| words[*at] = 0);
        words[end.pitch] = size[0];
        if let Some(height) = end.height {
            words[height] = size[1];
        }
    }

    /// Moves an end by a place.
    pub fn shift(self, words: &mut [u64], is_target: bool, place: [u64; 3]) {
        for (at, more) in self.end(is_target).origin.iter().zip(place) {
            if let Some(at) = at {
                words[*at] = words[*at].wrapping_add(more);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_reaches_as_far_as_its_last_row() {
        let mut words = [0; 25];
        Form::Three.resize(&mut words, [10, 4, 2]);
        let [source, target] = Form::Three.ends();
        (words[source.pitch], words[source.height.unwrap()]) = (16, 5);
        (words[0], words[1], words[2]) = (3, 1, 1);
        // Layer 2, row 4: (2 * 5 + 4) * 16 + 3, and ten bytes.
        assert_eq!(Form::Three.extent(&words, false), Some(2 * 80 + 4 * 16 + 3 + 10));
        assert_eq!(Form::Three.extent(&words, true), Some(40 + 30 + 10));
        words[target.pitch] = u64::MAX;
        assert_eq!(Form::Three.extent(&words, true), None);
        Form::Three.pack(&mut words, false);
        assert_eq!(Form::Three.extent(&words, false), Some(80));
        let mut words = [0; 16];
        Form::Two.resize(&mut words, [10, 4, 1]);
        Form::Two.shift(&mut words, true, [1, 2, 9]);
        assert_eq!((words[7], words[8]), (1, 2));
        words[3] = 77;
        let three = Form::Two.to_three(&words);
        assert_eq!((Form::Three.size(&three), three[5], three[11], three[12]), ([10, 4, 1], 77, 1, 2));
        assert_eq!(Form::Three.extent(&three, true), Form::Two.extent(&words, true));
        assert_eq!(Form::Two.extent(&words, true), Some(61));
    }
}
