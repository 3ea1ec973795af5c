//! Attributes: the words after an op's name, such as the `fast` of `exp.fast`.
//!
//! An op's row in the [table](super::Opcode) lists the kinds it takes, in the order in which they are
//! written. An op stores each as the index of its word.

macro_rules! attributes {
    ($(
        $(#[doc = $doc:literal])+
        $name:ident $(default $default:ident)? {
            $( $(#[doc = $word_doc:literal])+ $word:ident = $text:literal, )+
        }
    )+) => {
        /// A kind of attribute.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum AttrKind {
            $( $(#[doc = $doc])+ $name, )+
        }

        impl AttrKind {
            /// Every kind.
            pub const ALL: &[AttrKind] = &[$(AttrKind::$name),+];

            /// The kind's name, for messages and documents.
            pub const fn name(self) -> &'static str {
                match self { $(AttrKind::$name => stringify!($name),)+ }
            }

            /// The words, by stored index.
            pub const fn words(self) -> &'static [&'static str] {
                match self { $(AttrKind::$name => &[$($text),+],)+ }
            }

            /// What each word means, by stored index.
            pub const fn meanings(self) -> &'static [&'static str] {
                match self { $(AttrKind::$name => &[$(concat!($($word_doc),+)),+],)+ }
            }

            /// The index that text leaves out; `None` where a word is always written.
            pub const fn default(self) -> Option<u8> {
                match self { $(AttrKind::$name => attributes!(@default $name $($default)?),)+ }
            }
        }

        $(
            $(#[doc = $doc])+
            #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
            #[repr(u8)]
            pub enum $name {
                $( $(#[doc = $word_doc])+ $word, )+
            }

            impl Attribute for $name {
                const KIND: AttrKind = AttrKind::$name;
                const VALUES: &'static [$name] = &[$($name::$word),+];
                fn index(self) -> u8 { self as u8 }
            }
        )+
    };
    (@default $name:ident) => { None };
    (@default $name:ident $default:ident) => { Some($name::$default as u8) };
}

/// A typed attribute.
pub trait Attribute: Copy + 'static {
    /// Its kind.
    const KIND: AttrKind;
    /// Its values, by stored index.
    const VALUES: &'static [Self];
    /// The index that an op stores.
    fn index(self) -> u8;
}

attributes! {
    /// A dimension of the block and of the grid.
    Axis {
        /// The dimension whose neighbours share a warp.
        X = "x",
        /// The second dimension.
        Y = "y",
        /// The third dimension.
        Z = "z",
    }
    /// How exact a float op is.
    Accuracy default Precise {
        /// Within the ulps that the op's row states, the same for every input.
        Precise = "precise",
        /// Whatever the device has in hardware, within the op's stated relative error. Subnormals may become zero.
        Fast = "fast",
    }
    /// What a load or store expects of the caches. A hint: it never changes a result.
    Cache default Normal {
        /// Nothing in particular.
        Normal = "normal",
        /// Touched once: evict it first.
        Stream = "stream",
        /// Touched again soon: evict it last.
        Keep = "keep",
    }
    /// Memory order, as in C++ atomics.
    Order default Relaxed {
        /// Atomic, and orders nothing else.
        Relaxed = "relaxed",
        /// What follows sees what the matching release saw.
        Acquire = "acquire",
        /// What came before is seen by the matching acquire.
        Release = "release",
        /// Both.
        AcqRel = "acqrel",
        /// Sequentially consistent, for fences only: both, and all such fences of the scope occur in one order.
        SeqCst = "seqcst",
    }
    /// Which threads an atomic or a fence is about.
    Scope {
        /// The threads of this block.
        Block = "block",
        /// The threads of this launch.
        Device = "device",
        /// Those, the host and other devices.
        System = "system",
    }
    /// Which threads wait for each other.
    BarrierScope {
        /// All threads of the block.
        Block = "block",
        /// The 32 threads of the warp.
        Warp = "warp",
    }
    /// How a matrix lies where it is stored.
    Turn default Plain {
        /// As it is.
        Plain = "n",
        /// Transposed: its columns become rows.
        Transposed = "t",
    }
    /// How the first factor of a product lies.
    Left default Plain {
        /// As it is multiplied.
        Plain = "a",
        /// Transposed: its columns are the factor's rows.
        Transposed = "at",
    }
    /// How the second factor of a product lies.
    Right default Plain {
        /// As it is multiplied.
        Plain = "b",
        /// Transposed: its columns are the factor's rows.
        Transposed = "bt",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_has_a_meaning() {
        for kind in AttrKind::ALL {
            assert_eq!(kind.words().len(), kind.meanings().len());
            assert!(kind.default().is_none_or(|d| usize::from(d) < kind.words().len()));
        }
    }
}
