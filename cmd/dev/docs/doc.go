// Package docs holds the tests that keep the module's documents true: the names in the map of ARCHITECTURE.md, the links
// between documents, the driver that README.md shows, and the classes that steps use. It checks no prose: make prose does.
package docs
