//! The CUDA driver's functions as data: what a library that stands in the driver's place, or forwards its calls, knows of them.
//!
//! `functions.txt` has a line per exported name. [`FUNCTIONS`] is that, parsed; a function's number is its place there. [`names`] is how
//! `cuGetProcAddress` chooses among the versions of a function. [`hints`] is what drivers keep of managed memory.

pub mod hints;
pub mod names;
mod parse;
pub mod tables;

use std::sync::LazyLock;

pub use parse::{BadLine, parse};

/// All functions, in the order of their names.
///
/// # Panics
/// Never: a test parses the table.
pub static FUNCTIONS: LazyLock<Vec<Function>> =
    LazyLock::new(|| parse(include_str!("../functions.txt")).expect("functions.txt is well formed"));

/// The number of a function.
#[must_use]
pub fn number(name: &str) -> Option<usize> {
    FUNCTIONS.binary_search_by(|function| function.name.as_str().cmp(name)).ok()
}

/// A function of the driver.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Function {
    /// The version of CUDA it came with: 11020 is 11.2.
    pub since: i32,
    /// Its name, as the library exports it.
    pub name: String,
    /// Its parameters in order.
    pub parameters: Vec<Parameter>,
    /// The parameter by which it returns a new object: one to which there was no handle before.
    pub makes: Option<usize>,
    /// The parameter with the owner of the objects that it returns. The driver ends an object when it ends the owner.
    ///
    /// Nodes and graphs are not among them: a graph says itself what is in it.
    pub owner: Option<usize>,
}

impl Function {
    fn new(since: i32, name: String, parameters: Vec<Parameter>) -> Self {
        let function = Self { since, name, parameters, makes: None, owner: None };
        Self { makes: function.find_made(), owner: function.find_owner(), ..function }
    }

    /// The first parameter by which the function returns handles, and what they are handles of.
    #[must_use]
    pub fn returned(&self) -> Option<(usize, Object)> {
        self.parameters.iter().enumerate().find_map(|(at, parameter)| match parameter.kind {
            Kind::Pointer { way: Way::Out, item: Item::Handle(object), .. } => Some((at, object)),
            _ => None,
        })
    }

    fn find_made(&self) -> Option<usize> {
        const WORDS: [&str; 6] =
            ["Create", "Load", "GraphAdd", "GraphClone", "GraphInstantiate", "IpcOpenEvent"];
        let (at, object) = self.returned()?;
        // Physical memory counts its handles.
        let makes = object != Object::Memory && WORDS.iter().any(|word| self.name.contains(word));
        makes.then_some(at)
    }

    fn find_owner(&self) -> Option<usize> {
        let owners: &[Object] = match self.returned()?.1 {
            Object::Function => &[Object::Module, Object::Kernel],
            Object::Kernel => &[Object::Library],
            // Of a function: the module of its library.
            Object::Module => &[Object::Library, Object::Function],
            Object::TextureReference | Object::SurfaceReference => &[Object::Module],
            Object::Array => &[Object::Mipmap, Object::Array, Object::Graphics],
            Object::Mipmap => &[Object::ExternalMemory, Object::Graphics],
            Object::Stream | Object::Context => &[Object::GreenContext],
            _ => &[],
        };
        let owns = |kind: Kind| matches!(kind, Kind::Handle(object) if owners.contains(&object));
        self.parameters.iter().position(|parameter| owns(parameter.kind))
    }
}

/// A parameter of a function.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Parameter {
    /// What the header calls it.
    pub name: String,
    /// What it is.
    pub kind: Kind,
}

/// What a parameter is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Kind {
    /// A number of so many bytes.
    Number(usize),
    /// An address of a device, or of any memory, and how much of it the call reads or writes.
    Address(Extent),
    /// A floating-point number, which is passed in another register.
    Float,
    /// A handle.
    Handle(Object),
    /// A handle of what the call ends.
    Drop(Object),
    /// A structure of so many bytes that is passed by value.
    Value(usize),
    /// Points to values.
    Pointer {
        /// Who reads and who writes them.
        way: Way,
        /// What each is.
        item: Item,
        /// How many there are.
        count: Count,
    },
    /// A string.
    Text,
    /// The call writes a pointer to a string that lives as long as its object.
    OutText,
    /// A pointer of another form.
    Other,
}

/// Which way values go behind a pointer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Way {
    /// The call reads them.
    In,
    /// It writes them.
    Out,
    /// Both.
    InOut,
}

/// How many bytes behind an address a call reads or writes. Numbers of parameters are places in [`Function::parameters`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Extent {
    /// None: the call only names the memory.
    None,
    /// A fixed number.
    Bytes(u64),
    /// As many elements of `unit` bytes as a parameter says.
    Elements {
        /// The parameter.
        count: usize,
        /// Bytes of an element.
        unit: u64,
    },
    /// Rows of such elements.
    Rows {
        /// The parameter with the elements of a row.
        count: usize,
        /// Bytes of an element.
        unit: u64,
        /// The parameter with the number of rows.
        rows: usize,
        /// The parameter with the bytes from row to row.
        pitch: usize,
    },
}

impl Extent {
    /// Returns the number of bytes from the address to the last byte that a call with these parameters reaches; `None` if no address reaches as far.
    pub fn bytes(self, parameter: impl Fn(usize) -> u64) -> Option<u64> {
        match self {
            Self::None => Some(0),
            Self::Bytes(bytes) => Some(bytes),
            Self::Elements { count, unit } => parameter(count).checked_mul(unit),
            Self::Rows { count, unit, rows, pitch } => {
                let (count, rows) = (parameter(count), parameter(rows));
                if count == 0 || rows == 0 {
                    return Some(0);
                }
                (rows - 1).checked_mul(parameter(pitch))?.checked_add(count.checked_mul(unit)?)
            }
        }
    }
}

/// What a pointer points to.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Item {
    /// So many bytes without handles or pointers.
    Bytes(usize),
    /// A handle.
    Handle(Object),
}

impl Item {
    /// Bytes of one.
    #[must_use]
    pub fn size(self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Handle(_) => 8,
        }
    }
}

/// How many values a pointer points to.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Count {
    /// One.
    One,
    /// As many as the parameter of this place says, less so many.
    Of(usize, usize),
}

macro_rules! objects {
    ($($name:ident $text:literal)*) => {
        /// What a handle is of.
        #[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
        #[allow(missing_docs)]
        pub enum Object { $($name),* }

        impl Object {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            fn named(name: &str) -> Option<Self> {
                match name { $($text => Some(Self::$name),)* _ => None }
            }

            /// Returns whether such an object ends with the context that was current when it was made.
            #[must_use]
            pub fn is_of_context(self) -> bool {
                matches!(
                    self,
                    Self::Module
                        | Self::Function
                        | Self::Stream
                        | Self::Event
                        | Self::Array
                        | Self::Mipmap
                        | Self::Texture
                        | Self::Surface
                        | Self::TextureReference
                        | Self::Graphics
                )
            }
        }
    };
}

objects! {
    Context "context" Stream "stream" Event "event" Module "module" Function "function" Library "library" Kernel "kernel"
    Graph "graph" Node "node" Exec "exec" Pool "pool" Array "array" Mipmap "mipmap" Link "link" Texture "texture"
    Surface "surface" UserObject "userobject" Memory "memory" ExternalMemory "extmemory" Semaphore "semaphore"
    GreenContext "greenctx" TextureReference "texref" SurfaceReference "surfref" Graphics "graphics"
    Resource "resourcedesc" Conditional "conditional" DeviceNode "devicenode"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_order() {
        assert_eq!(FUNCTIONS.len(), 758);
        assert!(FUNCTIONS.is_sorted_by(|a, b| a.name < b.name));
        for (at, function) in FUNCTIONS.iter().enumerate() {
            assert_eq!(number(&function.name), Some(at));
        }
    }

    #[test]
    fn parameters_say_what_they_are() {
        let of = |name: &str| FUNCTIONS[number(name).expect(name)].parameters.clone();
        let kinds = |name: &str| of(name).iter().map(|parameter| parameter.kind).collect::<Vec<_>>();
        let out = |item| Kind::Pointer { way: Way::Out, item, count: Count::One };
        assert_eq!(kinds("cuMemAlloc_v2"), [out(Item::Bytes(8)), Kind::Number(8)]);
        assert_eq!(
            kinds("cuGraphGetNodes"),
            [
                Kind::Handle(Object::Graph),
                Kind::Pointer { way: Way::Out, item: Item::Handle(Object::Node), count: Count::Of(2, 0) },
                Kind::Pointer { way: Way::InOut, item: Item::Bytes(8), count: Count::One },
            ]
        );
        assert_eq!(kinds("cuStreamDestroy_v2"), [Kind::Drop(Object::Stream)]);
    }

    #[test]
    fn objects_end_with_their_owners() {
        let function = |name: &str| &FUNCTIONS[number(name).expect(name)];
        let check = |name: &str, owner: Option<&str>| {
            let found = function(name).owner.map(|at| function(name).parameters[at].name.as_str());
            assert_eq!(found, owner, "{name}");
        };
        check("cuModuleGetFunction", Some("hmod"));
        check("cuModuleEnumerateFunctions", Some("mod"));
        check("cuKernelGetFunction", Some("kernel"));
        check("cuLibraryGetKernel", Some("library"));
        check("cuLibraryGetModule", Some("library"));
        check("cuMipmappedArrayGetLevel", Some("hMipmappedArray"));
        check("cuGreenCtxStreamCreate", Some("greenCtx"));
        check("cuModuleLoadDataEx", None);
        check("cuStreamGetCtx", None);
        check("cuTexRefGetArray", None);
        let makes = |name: &str| function(name).makes;
        assert_eq!(makes("cuGraphInstantiate_v2"), Some(0));
        assert_eq!(makes("cuLinkCreate_v2"), Some(3));
        assert_eq!(makes("cuGraphClone"), Some(0));
        for name in [
            "cuModuleGetFunction",
            "cuStreamEndCapture",
            "cuMemCreate",
            "cuDevicePrimaryCtxRetain",
            "cuGraphNodeFindInClone",
        ] {
            assert_eq!(makes(name), None, "{name}");
        }
    }

    #[test]
    fn an_address_reaches_as_far_as_its_parameters_say() {
        let check = |name: &str, at: usize, parameters: &[u64], expect: Option<u64>| {
            let Kind::Address(extent) = FUNCTIONS[number(name).expect(name)].parameters[at].kind else {
                panic!("{name} {at} is not an address")
            };
            assert_eq!(extent.bytes(|at| parameters[at]), expect, "{name} {parameters:?}");
        };
        check("cuMemcpyPeer", 2, &[1, 2, 3, 4, 5], Some(5));
        check("cuMemFree_v2", 0, &[1], Some(0));
        check("cuStreamWriteValue64_v2", 1, &[0, 8, 1, 0], Some(8));
        check("cuMemsetD32Async_ptsz", 0, &[1, 7, 5, 0], Some(20));
        check("cuMemsetD32Async_ptsz", 0, &[1, 7, 1 << 62, 0], None);
        check("cuMemsetD2D16_v2", 0, &[1, 100, 7, 10, 3], Some(220));
        check("cuMemsetD2D16_v2", 0, &[1, u64::MAX, 7, 10, 1], Some(20));
        check("cuMemsetD2D16_v2", 0, &[1, u64::MAX, 7, 10, 2], None);
        check("cuMemsetD2D16_v2", 0, &[1, u64::MAX, 7, 10, 0], Some(0));
        check("cuMemsetD2D16_v2", 0, &[1, u64::MAX, 7, 0, 9], Some(0));
    }
}
