//! Certificates, as an operator makes them.

use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    date_time_ymd,
};

/// The purposes of certificates (their extended key usage).
pub(crate) const SERVER: ExtendedKeyUsagePurpose = ExtendedKeyUsagePurpose::ServerAuth;
pub(crate) const PROGRAM: ExtendedKeyUsagePurpose = ExtendedKeyUsagePurpose::ClientAuth;

/// An authority, and what it signs, in a folder.
pub(crate) struct Authority {
    folder: PathBuf,
    name: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    pub(crate) fn new(folder: &Path, name: &str) -> Self {
        let mut parameters = CertificateParams::new(Vec::new()).expect("parameters");
        parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        parameters.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().expect("a key");
        let certificate = parameters.self_signed(&key).expect("a certificate");
        std::fs::write(folder.join(format!("{name}.pem")), certificate.pem()).expect("written");
        Self { folder: folder.into(), name: name.into(), issuer: Issuer::new(parameters, key) }
    }

    /// The file of its certificate.
    pub(crate) fn file(&self) -> PathBuf {
        self.folder.join(format!("{}.pem", self.name))
    }

    /// Signs a certificate for a host's name, or for none where that is empty. Returns its file and that of its key.
    pub(crate) fn sign(
        &self,
        file: &str,
        name: &str,
        purpose: ExtendedKeyUsagePurpose,
        is_expired: bool,
    ) -> [PathBuf; 2] {
        let names: Vec<_> = Some(name.to_owned()).filter(|name| !name.is_empty()).into_iter().collect();
        let mut parameters = CertificateParams::new(names).expect("parameters");
        parameters.distinguished_name.push(DnType::CommonName, file);
        parameters.extended_key_usages.push(purpose);
        if is_expired {
            parameters.not_before = date_time_ymd(2001, 1, 1);
            parameters.not_after = date_time_ymd(2002, 1, 1);
        }
        let key = KeyPair::generate().expect("a key");
        let certificate = parameters.signed_by(&key, &self.issuer).expect("a certificate");
        let files = ["pem", "key"].map(|end| self.folder.join(format!("{file}.{end}")));
        for (path, text) in files.iter().zip([certificate.pem(), key.serialize_pem()]) {
            std::fs::write(path, text).expect("written");
        }
        files
    }
}
