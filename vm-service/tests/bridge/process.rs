//! What these tests see of processes.

use std::path::PathBuf;
use std::process::Child;
use std::time::{Duration, Instant};

/// A library that cargo builds. None is linked here: they have the names of others.
pub(crate) fn beside(name: &str) -> PathBuf {
    std::env::current_exe().expect("the test's path").with_file_name(name)
}

/// A process that is killed when it is dropped.
pub(crate) struct Running(pub(crate) Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It fails on one that has ended.
        let _ = self.0.kill();
        self.0.wait().expect("ended");
    }
}

impl Running {
    /// The processes that it started.
    pub(crate) fn workers(&self) -> Vec<u32> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.0.id())).expect("its threads");
        // A thread may have ended meanwhile.
        let children = tasks.map(|task| {
            std::fs::read_to_string(task.expect("a thread").path().join("children")).unwrap_or_default()
        });
        let children: String = children.collect();
        children.split_whitespace().map(|id| id.parse().expect("a number")).collect()
    }

    /// Whether no program is served any more, and all recordings are complete.
    pub(crate) fn is_idle(&self) -> bool {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.0.id())).expect("its threads");
        let mut names = tasks.map(|task| {
            // A thread may have ended meanwhile.
            std::fs::read_to_string(task.expect("a thread").path().join("comm")).unwrap_or_default()
        });
        !names.any(|name| ["program", "worker", "recording"].contains(&name.trim_end()))
    }

    /// How many descriptors and threads it has.
    pub(crate) fn has(&self) -> [usize; 2] {
        ["fd", "task"]
            .map(|of| std::fs::read_dir(format!("/proc/{}/{of}", self.0.id())).expect("it runs").count())
    }
}

/// Waits until something is so. The deadline is only for what never comes: a busy machine may take long for anything.
pub(crate) fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(600);
    while !is_so() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
