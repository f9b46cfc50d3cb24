// Package lastgood keeps on a MachineClass the version from which its driver last
// made an instance, so that instances can still be deleted when the class was
// edited into what no driver accepts. It reads and writes one annotation, and
// knows neither clusters nor drivers.
package lastgood
