//! Warnings of `egpu watch`: each is raised once, and withdrawn when its cause ends.

use std::sync::mpsc::Sender;

use vm_passthrough::egpu::Change;
use vm_passthrough::usb4::UniqueId;

use crate::log;

/// An event for the reader of the output.
pub(super) struct Told {
    /// The enclosure; `None` where it is about all.
    pub(super) id: Option<UniqueId>,
    /// Its name.
    pub(super) name: String,
    pub(super) what: What,
    /// When, as RFC 3339 has it.
    pub(super) time: String,
}

pub(super) enum What {
    /// A step in the life of an enclosure.
    Changed(Change),
    /// A warning, or that it does not hold any more.
    Warned { text: String, is_withdrawn: bool },
}

/// Tells about one enclosure, or about all.
#[derive(Clone)]
pub(super) struct Teller {
    pub(super) id: Option<UniqueId>,
    pub(super) name: String,
    pub(super) tell: Sender<Told>,
}

impl Teller {
    pub(super) fn tell(&self, what: What) {
        // The receiver may have ended.
        let _ = self.tell.send(Told { id: self.id, name: self.name.clone(), what, time: log::now() });
    }

    fn warn(&self, text: &str, is_withdrawn: bool) {
        let enclosure = self.id.map(|id| id.to_string());
        let name = if self.name.is_empty() { String::new() } else { format!("{}: ", self.name) };
        match is_withdrawn {
            false => tracing::warn!(enclosure, "{name}{text}"),
            true => tracing::info!(enclosure, "{name}no longer: {text}"),
        }
        self.tell(What::Warned { text: text.to_owned(), is_withdrawn });
    }
}

/// A warning of one kind about one enclosure, while its cause lasts.
#[derive(Debug, Default)]
pub(super) struct Warning(Option<String>);

impl Warning {
    /// Takes what is wrong now: raises it, unless that is done, and withdraws what does not hold any more.
    pub(super) fn update(&mut self, now: Option<String>, teller: &Teller) {
        // How long something was waited for is no other cause.
        let cause = |text: &Option<String>| {
            text.as_deref().and_then(|text| text.split(" s;").next()).map(str::to_owned)
        };
        if cause(&now) == cause(&self.0) {
            return;
        }
        if let Some(before) = self.0.take() {
            teller.warn(&before, true);
        }
        if let Some(now) = &now {
            teller.warn(now, false);
        }
        self.0 = now;
    }
}
