//! Kernels of a file, which do nothing: so a program's calls can be made without its images. Each line has a kernel's name, then the place and the size of
//! each of its parameters, as in `_Z3addPfS_ 0:8 8:8`. Variables have 64 KiB, whatever they are called.

use crate::{
    error::Result,
    module::{self, Program, Run, Shape},
    state::State,
};
use std::{
    collections::BTreeMap,
    sync::{Arc, MutexGuard},
};

const VARIABLES: u64 = 64 << 10;

/// All of the file: what every image holds then.
#[derive(Clone)]
pub(crate) struct Named(Arc<BTreeMap<String, Vec<(usize, usize)>>>);

struct Kernel {
    name: String,
    parameters: Vec<(usize, usize)>,
}

impl Named {
    /// Reads the text of the file; what does not parse is no parameter.
    pub(crate) fn read(text: &str) -> Self {
        let parameter = |text: &str| {
            let (at, size) = text.split_once(':')?;
            Some((at.parse().ok()?, size.parse().ok()?))
        };
        let kernel = |line: &str| {
            let mut words = line.split_whitespace();
            Some((words.next()?.to_owned(), words.filter_map(parameter).collect()))
        };
        Self(Arc::new(text.lines().filter_map(kernel).collect()))
    }
}

impl Program for Named {
    fn kernels(&self) -> Vec<String> {
        self.0.keys().cloned().collect()
    }

    fn kernel(&self, name: &str) -> Option<Arc<dyn module::Kernel>> {
        let parameters = self.0.get(name)?.clone();
        Some(Arc::new(Kernel { name: name.to_owned(), parameters }))
    }

    fn size(&self) -> u64 {
        VARIABLES
    }

    fn variable(&self, _name: &str) -> Option<(u64, u64)> {
        Some((0, VARIABLES))
    }
}

impl module::Kernel for Kernel {
    fn name(&self) -> &str {
        &self.name
    }

    fn parameters(&self) -> Vec<(usize, usize)> {
        self.parameters.clone()
    }

    fn attribute(&self, attribute: i32) -> i32 {
        module::without_code(attribute)
    }

    fn prepare(&self, _shape: &Shape) -> Result<Arc<dyn Run>> {
        Ok(Arc::new(Nothing))
    }
}

struct Nothing;

impl Run for Nothing {
    fn run(
        &self,
        state: MutexGuard<'static, State>,
        _context: u64,
        _grid: [u32; 3],
        _parameters: &[u8],
    ) -> (MutexGuard<'static, State>, Result) {
        (state, Ok(()))
    }
}
