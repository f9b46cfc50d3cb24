// Package lastgood keeps on a MachineClass the version from which its driver last
// created an instance. With it drivers can still delete instances after an edit that
// they do not accept. The package only reads and writes one annotation.
package lastgood
