// Package docs holds the tests that keep the module's documents true: the names in the map of ARCHITECTURE.md, the links
// between documents, and the driver that README.md shows. Their prose is checked by make prose.
package docs
